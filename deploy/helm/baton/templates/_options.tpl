{{/*
Refuses flags and settings that no command of Baton has. `make reference` writes files/options.json from the commands.
*/}}

{{/* Takes the root. All of the file. */}}
{{- define "baton.options" -}}
{{- .Files.Get "files/options.json" -}}
{{- end }}

{{/* Takes (list kinds flag). How a command takes the flag: switch, value, values; empty if it has none. */}}
{{- define "baton.options.kind" -}}
{{- range $kind := list "switch" "value" "values" -}}
{{- if has (last $) (get (first $) $kind) }}{{ $kind }}{{ end -}}
{{- end -}}
{{- end }}

{{/* Takes (list name names). The name of these that is most like it; empty if none is. Compares the beginning and the end. */}}
{{- define "baton.nearest" -}}
{{- $name := first . -}}
{{- $best := dict "name" "" "score" 75 -}}
{{- range $each := last . -}}
{{- $most := min (len $name) (len $each) | int -}}
{{- $head := 0 -}}
{{- range $i := untilStep 1 (int (add1 $most)) 1 -}}
{{- if hasPrefix (substr 0 $i $name) $each }}{{ $head = $i }}{{ end -}}
{{- end -}}
{{- $tail := 0 -}}
{{- range $i := untilStep 1 (sub (add1 $most) $head | int) 1 -}}
{{- if hasSuffix (substr (sub (len $name) $i | int) (len $name) $name) $each }}{{ $tail = $i }}{{ end -}}
{{- end -}}
{{- $score := div (mul 200 (add $head $tail)) (add (len $name) (len $each)) | int -}}
{{- if gt $score (int $best.score) }}{{ $best = dict "name" $each "score" $score }}{{ end -}}
{{- end -}}
{{- $best.name -}}
{{- end }}

{{/* Takes (list root where flag commands form). Refuses a flag that none of these commands has. `form` writes a flag as it was given. */}}
{{- define "baton.options.known" -}}
{{- $where := index . 1 -}}
{{- $flag := index . 2 -}}
{{- $form := index . 4 -}}
{{- $options := include "baton.options" (first .) | fromJson -}}
{{- $flags := list -}}
{{- range $command := index . 3 -}}
{{- range $kind, $these := omit (get $options.commands $command) "aliases" -}}
{{- $flags = concat $flags $these -}}
{{- end -}}
{{- if eq $form "variable" -}}
{{- $aliases := get (get $options.commands $command) "aliases" -}}
{{- $kept := list -}}
{{- range $flags }}{{ if not (has . $aliases) }}{{ $kept = append $kept . }}{{ end }}{{ end -}}
{{- $flags = $kept -}}
{{- end -}}
{{- end -}}
{{- if not (has $flag $flags) -}}
{{- $names := list -}}
{{- range $flags }}{{ $names = trimPrefix "--" . | append $names }}{{ end -}}
{{- $nearest := include "baton.nearest" (list (trimPrefix "--" $flag) (uniq $names)) -}}
{{- $hint := "" -}}
{{- if hasKey $options.refused $flag -}}
{{- $hint = printf ": %s" (get $options.refused $flag) -}}
{{- else if $nearest -}}
{{- $hint = printf "; did you mean %s?" (eq $form "variable" | ternary (include "baton.options.variable" $nearest) (printf "--%s" $nearest)) -}}
{{- end -}}
{{- $given := eq $form "variable" | ternary (include "baton.options.variable" (trimPrefix "--" $flag)) $flag -}}
{{- fail (printf "%s: baton %s has no %s%s" $where (index . 3 | join ", ") $given $hint) -}}
{{- end -}}
{{- end }}

{{/* Takes the name of a flag without dashes. Its variable. */}}
{{- define "baton.options.variable" -}}
BATON_{{ . | upper | replace "-" "_" }}
{{- end }}

{{/* Takes the name of a variable. Its flag. */}}
{{- define "baton.options.flag" -}}
--{{ trimPrefix "BATON_" . | lower | replace "_" "-" }}
{{- end }}

{{/* Takes the root. Refuses settings that no role has. */}}
{{- define "baton.options.settings" -}}
{{- $commands := append (include "baton.workers" . | splitList " ") "router" -}}
{{- if .Values.gateway.enabled }}{{ $commands = append $commands "picker" }}{{ end -}}
{{- if eq .Values.workload "RayCluster" }}{{ $commands = list "serve" }}{{ end -}}
{{- range $name, $_ := .Values.settings -}}
{{- if hasPrefix "BATON_" $name -}}
{{- include "baton.options.known" (list $ "settings" (include "baton.options.flag" $name) $commands "variable") -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/*
Takes the dict of "baton.pod". Refuses flags and variables of its container that its command has not, and those that are given in vain:
twice, or as a setting beside a flag of the chart.
*/}}
{{- define "baton.options.check" -}}
{{- $root := .root -}}
{{- $values := .values -}}
{{- $component := .component -}}
{{- $args := (include .container . | fromYaml).args -}}
{{- if $args -}}
{{- $command := first $args -}}
{{- $kinds := get (include "baton.options" $root | fromJson).commands $command -}}
{{- $where := printf "%s.args" $component -}}
{{- $seen := dict -}}
{{- range $args -}}
{{- if hasPrefix "--" . -}}
{{- $flag := splitList "=" . | first -}}
{{- include "baton.options.known" (list $root $where $flag (list $command) "flag") -}}
{{- $kind := include "baton.options.kind" (list $kinds $flag) -}}
{{- if and (eq $kind "switch") (contains "=" .) -}}
{{- fail (printf "%s: %s takes no value, not %s" $where $flag .) -}}
{{- else if and (ne $kind "switch") (not (contains "=" .)) -}}
{{- fail (printf "%s: %s needs a value: write %s=VALUE" $where $flag $flag) -}}
{{- else if and (ne $kind "values") (hasKey $seen $flag) -}}
{{- fail (printf "%s: %s is given twice; the chart sets it, or the list does" $where $flag) -}}
{{- end -}}
{{- $own := not (has . (default list $values.args)) -}}
{{- $_ := set $seen $flag $own -}}
{{- end -}}
{{- end -}}
{{- range $name, $_ := default false .settings | ternary $root.Values.settings dict -}}
{{- if and (hasPrefix "BATON_" $name) (get $seen (include "baton.options.flag" $name)) -}}
{{- fail (printf "settings: %s has no effect on %s, whose %s the chart sets" $name $component (include "baton.options.flag" $name)) -}}
{{- end -}}
{{- end -}}
{{- range $values.env -}}
{{- if hasPrefix "BATON_" .name -}}
{{- include "baton.options.known" (list $root (printf "%s.env" $component) (include "baton.options.flag" .name) (list $command) "variable") -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}
