{{/*
Refuses flags and settings that no command of Baton has. `make reference` writes files/options.json from the commands.
*/}}

{{/*
Takes a dict: root; where; commands; name (--FLAG or BATON_FLAG); value. Refuses a name that none of the commands has, and a
value that is none of its choices. Gives the kind of the flag: "switch", "value", or "values" if it may come again.
*/}}
{{- define "baton.options.given" -}}
{{- $variable := hasPrefix "BATON_" .name -}}
{{- $flag := $variable | ternary (include "baton.options.flag" .name) .name -}}
{{- $options := .root.Files.Get "files/options.json" | fromJson -}}
{{- $flags := dict -}}
{{- $choices := "" -}}
{{- range .commands -}}
{{- with get $options.commands . -}}
{{- $flags = merge $flags .flags ($variable | ternary .variables .aliases) -}}
{{- $choices = get .choices $flag | default $choices -}}
{{- end -}}
{{- end -}}
{{- if not (hasKey $flags $flag) -}}
{{- $hint := get $options.refused $flag | printf ": %s" | trimSuffix ": " -}}
{{- with empty $hint | not | ternary "" (include "baton.options.nearest" (list $flag (keys $flags | sortAlpha))) -}}
{{- $hint = $variable | ternary (trimPrefix "--" . | upper | replace "-" "_" | printf "BATON_%s") . | printf "; did you mean %s?" -}}
{{- end -}}
{{- fail (printf "%s: baton %s has no %s%s" .where (join ", " .commands) .name $hint) -}}
{{- else if and $choices (hasKey . "value") (not (splitList " " $choices | has .value)) -}}
{{- fail (printf "%s: %s: %q is none of %s" .where .name .value (replace " " ", " $choices)) -}}
{{- end -}}
{{- get $flags $flag -}}
{{- end }}

{{/* Takes the name of a variable. Its flag. */}}
{{- define "baton.options.flag" -}}
--{{ trimPrefix "BATON_" . | lower | replace "_" "-" }}
{{- end }}

{{/* Takes (list name names). Which of these begins and ends most like the name; empty if none does. */}}
{{- define "baton.options.nearest" -}}
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

{{/* Takes the root. Checks the settings against the roles of the release together. */}}
{{- define "baton.options.settings" -}}
{{- $commands := append (include "baton.workers" . | splitList " ") "router" -}}
{{- if .Values.gateway.enabled }}{{ $commands = append $commands "picker" }}{{ end -}}
{{- if eq .Values.workload "RayCluster" }}{{ $commands = list "serve" }}{{ end -}}
{{- range $name, $value := .Values.settings -}}
{{- if hasPrefix "BATON_" $name -}}
{{- $_ := include "baton.options.given" (dict "root" $ "where" "settings" "commands" $commands "name" $name "value" $value) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/*
Takes the dict of "baton.pod". Checks the flags and variables of its container against its command. Also refuses what has no
effect: a flag that comes twice, and a setting whose flag the chart gives.
*/}}
{{- define "baton.options.check" -}}
{{- $pod := . -}}
{{- $args := (include .container . | fromYaml).args -}}
{{- if $args -}}
{{- $of := dict "root" .root "commands" (list (first $args)) -}}
{{- $where := printf "%s.args" .component -}}
{{- $charts := dict -}}
{{- range $args -}}
{{- if hasPrefix "--" . -}}
{{- $flag := splitList "=" . | first -}}
{{- $value := trimPrefix (printf "%s=" $flag) . -}}
{{- $kind := merge (dict "where" $where "name" $flag "value" $value) $of | include "baton.options.given" -}}
{{- if and (eq $kind "switch") (contains "=" .) -}}
{{- fail (printf "%s: %s takes no value, not %s" $where $flag .) -}}
{{- else if and (ne $kind "switch") (not (contains "=" .)) -}}
{{- fail (printf "%s: %s needs a value: write %s=VALUE" $where $flag $flag) -}}
{{- else if and (ne $kind "values") (replace "--advanced." "--" $flag | hasKey $charts) -}}
{{- fail (printf "%s: %s is given twice; the chart sets it, or the list does" $where $flag) -}}
{{- end -}}
{{- $_ := default list $pod.values.args | has . | not | set $charts (replace "--advanced." "--" $flag) -}}
{{- end -}}
{{- end -}}
{{- range $name, $_ := default false .settings | ternary .root.Values.settings dict -}}
{{- if and (hasPrefix "BATON_" $name) (include "baton.options.flag" $name | get $charts) -}}
{{- fail (printf "settings: %s has no effect on %s, whose %s the chart sets" $name $pod.component (include "baton.options.flag" $name)) -}}
{{- end -}}
{{- end -}}
{{- range .values.env -}}
{{- if hasPrefix "BATON_" .name -}}
{{- $_ := merge (dict "where" (printf "%s.env" $pod.component)) $of . | include "baton.options.given" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}
