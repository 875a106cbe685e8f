{{/* The prefix of all names: as usual, the release, and the chart unless the release says so already. */}}
{{- define "baton.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- default $full .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "baton.claim" -}}
{{- default (printf "%s-weights" (include "baton.fullname" .)) .Values.weights.claim -}}
{{- end }}

{{/* Takes the root and the name of a role. Seconds until Kubernetes kills a pod: its drain, preStop (at most 5 s) and an end. */}}
{{- define "baton.gracePeriod" -}}
{{- $role := get .root.Values .role -}}
{{- $drain := .root.Values.settings.BATON_DRAIN_TIMEOUT -}}
{{- range $role.args -}}
{{- if hasPrefix "--drain-timeout=" . -}}{{- $drain = trimPrefix "--drain-timeout=" . -}}{{- end -}}
{{- end -}}
{{- default (add 30 (ceil (float64 $drain))) $role.terminationGracePeriodSeconds -}}
{{- end }}

{{/* What all pods have. */}}
{{- define "baton.pod" -}}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
terminationGracePeriodSeconds: {{ include "baton.gracePeriod" . }}
{{- end }}

{{/* Takes the values of a role. Without a surge one pod ends before its successor starts. */}}
{{- define "baton.rollingUpdate" -}}
maxSurge: {{ .maxSurge }}
maxUnavailable: {{ eq (int .maxSurge) 0 | ternary 1 0 }}
{{- end }}
