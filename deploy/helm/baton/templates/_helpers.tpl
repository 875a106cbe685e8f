{{/* The prefix of all names: as usual, the release, and the chart unless the release says so already. */}}
{{- define "baton.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- default $full .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{/* Takes (list $ component). The labels of its pods, by which Services select them; without a component those of all pods. */}}
{{- define "baton.selector" -}}
{{- $labels := list -}}
{{- range rest . -}}
{{- $labels = list "app.kubernetes.io/name: baton" (printf "app.kubernetes.io/component: %s" .) -}}
{{- end -}}
{{- with first . -}}
{{- if not .Values.kustomize -}}
{{- $labels = append $labels (printf "app.kubernetes.io/instance: %q" .Release.Name) -}}
{{- end -}}
{{- end -}}
{{- join ", " $labels -}}
{{- end }}

{{/* Takes (list $ component). The labels of its objects; without a component those of all objects. */}}
{{- define "baton.labels" -}}
app.kubernetes.io/part-of: baton{{ with include "baton.selector" . }}, {{ . }}{{ end }}
{{- end }}

{{/* Takes a map of labels, which follow others. */}}
{{- define "baton.more" -}}
{{- range $name, $value := . }}, {{ $name }}: {{ quote $value }}{{ end -}}
{{- end }}

{{/* Takes (list $ component…). Selects the pods of these components; without a component all pods. */}}
{{- define "baton.pods" -}}
{{- $found := list -}}
{{- with include "baton.selector" (gt (len .) 2 | ternary (list (first .)) .) -}}
{{- $found = list (printf "matchLabels: {%s}" .) -}}
{{- end -}}
{{- if gt (len .) 2 -}}
{{- $name := "{key: app.kubernetes.io/name, operator: In, values: [baton]}" -}}
{{- $component := rest . | join ", " | printf "{key: app.kubernetes.io/component, operator: In, values: [%s]}" -}}
{{- $found = append $found (printf "matchExpressions: [%s, %s]" $name $component) -}}
{{- end -}}
{ {{- join ", " $found -}} }
{{- end }}

{{/* Takes (list $ name). Network policies of a release have its name, since releases may share a namespace. */}}
{{- define "baton.policy" -}}
{{- with first . }}{{ if not .Values.kustomize }}{{ include "baton.fullname" . }}-{{ end }}{{ end }}{{ last . -}}
{{- end }}

{{/* Takes (list $ name). The account as the subject of a RoleBinding. Kustomize knows the namespace. */}}
{{- define "baton.subject" -}}
{{- $root := first . -}}
{{- $namespace := $root.Values.kustomize | ternary "" (printf ", namespace: %s" $root.Release.Namespace) -}}
{kind: ServiceAccount, name: {{ include "baton.fullname" $root }}-{{ last . }}{{ $namespace }}}
{{- end }}

{{- define "baton.claim" -}}
{{- default (printf "%s-weights" (include "baton.fullname" .)) .Values.weights.claim -}}
{{- end }}

{{/* The URL of the store, which names the master, or the etcd that elects one. */}}
{{- define "baton.store" -}}
{{- with .Values.store.etcd.address -}}
mooncake://{{ . }}?ha=etcd
{{- else -}}
mooncake://{{ include "baton.fullname" . }}-store-master:50051
{{- end -}}
{{- end }}

{{/* The roles of workers that the release has, with blanks between them. */}}
{{- define "baton.workers" -}}
prefill decode{{ if gt (int .Values.encode.replicas) 0 }} encode{{ end }}
{{- end }}

{{/* Selects the pods of all workers. */}}
{{- define "baton.worker.pods" -}}
{{- include "baton.pods" (concat (list .) (include "baton.workers" . | splitList " ")) -}}
{{- end }}

{{/* Flags of every role. */}}
{{- define "baton.settings" -}}
{{- $store := .Values.store.enabled | ternary (dict "BATON_KV_STORE" (include "baton.store" .)) dict -}}
{{- $encoders := gt (int .Values.encode.replicas) 0 | ternary (dict "BATON_ENCODER_POOL" "true") dict -}}
{{- $drain := dict "BATON_DRAIN_TIMEOUT" (min 86400 (include "baton.requestTimeout" .) | toString) -}}
{{- merge dict .Values.settings $store $encoders $drain | toYaml -}}
{{- end }}

{{/* Takes (list $ values flag default): what a component is told by a flag in its args, its env or the settings. */}}
{{- define "baton.told" -}}
{{- $flag := index . 2 -}}
{{- $name := upper $flag | replace "-" "_" | printf "BATON_%s" -}}
{{- $found := get (index . 0).Values.settings $name | default (index . 3) -}}
{{- range (index . 1).env -}}
{{- if eq .name $name }}{{ $found = default $found .value }}{{ end -}}
{{- end -}}
{{- range (index . 1).args -}}
{{- $prefix := printf "--%s=" $flag -}}
{{- if hasPrefix $prefix . }}{{ $found = trimPrefix $prefix . }}{{ end -}}
{{- end -}}
{{- $found -}}
{{- end }}

{{/* The longest duration of a request, in whole seconds: what routers are told, or their default. */}}
{{- define "baton.requestTimeout" -}}
{{- $usual := (.Files.Get "files/options.json" | fromJson).request_timeout -}}
{{- $timeout := include "baton.told" (list . .Values.router "request-timeout" $usual) -}}
{{- float64 $timeout | ceil | int -}}
{{- end }}

{{/* Takes the dict of "baton.pod". The image of the cluster, unless the component has its own. */}}
{{- define "baton.image" -}}
{{- with merge dict (default dict .values.image) .root.Values.image }}{{ .repository }}:{{ .tag }}{{ end -}}
{{- end }}

{{- define "baton.user" -}}
{runAsNonRoot: true, runAsUser: 10001, runAsGroup: 10001, fsGroup: 10001, seccompProfile: {type: RuntimeDefault}}
{{- end }}

{{- define "baton.unprivileged" -}}
{allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
{{- end }}

{{/* Takes the dict of "baton.pod". Seconds until Kubernetes kills a pod: its drain, preStop (at most 5 s) and an end. */}}
{{- define "baton.gracePeriod" -}}
{{- $usual := min 86400 (include "baton.requestTimeout" .root) -}}
{{- $drain := include "baton.told" (list .root .values "drain-timeout" $usual) -}}
{{- default (add 30 (ceil (float64 $drain))) .values.terminationGracePeriodSeconds -}}
{{- end }}

{{/*
Takes (list $ values), those of a component. Without a surge one pod ends before its successor starts. With one, Kubernetes rounds the
quarter down: a component of three pods or fewer loses none before a new one is ready. Groups may round it up.
*/}}
{{- define "baton.rollingUpdate" -}}
{{- $root := first . -}}
{{- with last . -}}
{{- $lost := eq $root.Values.workload "RoleBasedGroup" | ternary "0" "25%" -}}
{{- $surge := include "baton.surge" . | int -}}
{maxUnavailable: {{ eq $surge 0 | ternary "1" $lost }}, maxSurge: {{ $surge }}}
{{- end -}}
{{- end }}

{{/* Takes the values of a component. How many pods it may have beyond its own during a rollout. */}}
{{- define "baton.surge" -}}
{{- hasKey . "maxSurge" | ternary .maxSurge 1 -}}
{{- end }}

{{/* Whether an autoscaler of Kubernetes sets the number of workers. */}}
{{- define "baton.autoscaled" -}}
{{- if and .Values.autoscaling.enabled (eq .Values.workload "Deployment") }}yes{{ end -}}
{{- end }}

{{/* Takes (list $ component). Nodes are drained one pod of it at a time, however many it has. A pod that is not ready holds up no drain. */}}
{{- define "baton.budget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "baton.fullname" (first .) }}-{{ last . }}
  labels: { {{- include "baton.labels" (list (first .)) -}} }
spec:
  maxUnavailable: 1
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector: {{ include "baton.pods" . }}
{{- end }}

{{/* Refuses what no template renders, and what cannot work. */}}
{{- define "baton.check" -}}
{{- include "baton.options.settings" . -}}
{{- if and (include "baton.autoscaled" .) (not .Values.monitoring.enabled) -}}
{{- fail "autoscaling reads metrics of workers from Prometheus: set autoscaling.enabled to false, or monitoring.enabled to true" -}}
{{- end -}}
{{- if and .Values.secrets.tls .Values.gateway.enabled -}}
{{- fail "an InferencePool has no TLS to its endpoints: leave out secrets.tls, or set gateway.enabled to false" -}}
{{- end -}}
{{- if and .Values.secrets.hub (eq (toString .Values.settings.HF_HUB_OFFLINE) "1") -}}
{{- fail "secrets.hub: HF_HUB_OFFLINE is 1, so nothing asks the hub: set settings.HF_HUB_OFFLINE to null" -}}
{{- end -}}
{{- if eq .Values.workload "RayCluster" -}}
{{- range $role := list "router" "prefill" "decode" "encode" "picker" -}}
{{- if (get $.Values $role).args -}}
{{- fail (printf "%s.args: in a RayCluster `baton serve` starts all roles: put its flags into settings" $role) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled (eq .Values.workload "RoleBasedGroup") -}}
{{- fail "a RoleBasedGroup has no autoscaler: set autoscaling.enabled to false" -}}
{{- end -}}
{{- if and (or .Values.store.enabled .Values.gateway.enabled) (eq .Values.workload "RayCluster") -}}
{{- fail "a RayCluster has no gateway and no store: set gateway.enabled and store.enabled to false" -}}
{{- end -}}
{{- end }}
