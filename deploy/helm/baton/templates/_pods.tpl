{{/*
The pod template of a component. Takes a dict: root; component; values (those of the component); container (the template
that is its container); account; token (if it uses the API server); the mounts of the container: weights, cluster, keys, shm
(a size), tmp (a size); settings, if it reads them; podIP, if its arguments have it; env (a template); labels, if its own are
not those of the component.
*/}}
{{- define "baton.pod" -}}
{{- $root := .root -}}
{{- include "baton.options.check" . -}}
{{- $labels := default (include "baton.selector" (list $root .component)) .labels -}}
metadata:
  labels: { {{- $labels -}} {{- include "baton.more" .values.podLabels -}} }
  {{- $checksum := dict -}}
  {{- if and .settings (not $root.Values.kustomize) -}}
  {{- $checksum = dict "checksum/settings" (include "baton.settings" $root | sha256sum) -}}
  {{- end -}}
  {{- with merge dict (default dict .values.podAnnotations) $checksum }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  serviceAccountName: {{ include "baton.fullname" $root }}-{{ .account }}
  automountServiceAccountToken: {{ default false .token }}
  enableServiceLinks: false  # service variables would start with BATON_, like the variables of our flags
  terminationGracePeriodSeconds: {{ include "baton.gracePeriod" . }}  # more than preStop and the drain need
  securityContext: {{ include "baton.user" . }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector: {matchLabels: { {{- $labels -}} }}
  {{- if .values.affinity }}
  affinity: {{- toYaml .values.affinity | nindent 4 }}
  {{- else if .affinity }}
  affinity: {{- nindent 4 .affinity }}
  {{- end }}
  {{- with .values.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .values.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  containers:
    - {{ include .container . | indent 6 | trim }}
      {{- with $root.Values.image.pullPolicy }}
      imagePullPolicy: {{ . }}
      {{- end }}
      {{- with include "baton.env" . }}
      env: {{- nindent 8 . }}
      {{- end }}
      {{- if .settings }}
      envFrom:
        - configMapRef: {name: {{ include "baton.fullname" $root }}-settings}
      {{- end }}
      resources: {{- toYaml .values.resources | nindent 8 }}
      securityContext: {{ include "baton.unprivileged" . }}
      volumeMounts: {{- include "baton.mounts" . | nindent 8 }}
  volumes: {{- include "baton.volumes" . | nindent 4 }}
{{- end }}

{{/* Takes the dict of "baton.pod". */}}
{{- define "baton.env" -}}
{{- $found := list -}}
{{- if .podIP -}}
{{- $found = append $found (dict "name" "POD_IP" "valueFrom" (dict "fieldRef" (dict "fieldPath" "status.podIP"))) -}}
{{- end -}}
{{- with .env }}{{ $found = include . $ | fromYamlArray | concat $found }}{{ end -}}
{{- if and .weights .root.Values.secrets.hub -}}
{{- $key := dict "name" .root.Values.secrets.hub "key" "token" -}}
{{- $found = append $found (dict "name" "HF_TOKEN" "valueFrom" (dict "secretKeyRef" $key)) -}}
{{- end -}}
{{- with .values.env }}{{ $found = concat $found . }}{{ end -}}
{{- with $found }}{{ toYaml . }}{{ end -}}
{{- end }}

{{- define "baton.mounts" -}}
{{- if and .weights .root.Values.weights.enabled -}}
- {name: weights, mountPath: /models, readOnly: true}
{{ end }}
{{- if .cluster -}}
- {name: cluster-secret, mountPath: /etc/baton/cluster, readOnly: true}
{{ end }}
{{- if .keys -}}
- {name: api-keys, mountPath: /etc/baton/api-keys, readOnly: true}
{{ if .root.Values.secrets.tls -}}
- {name: tls, mountPath: /etc/baton/tls, readOnly: true}
{{ end -}}
{{ end -}}
- {name: tmp, mountPath: /tmp}
{{- if .shm }}
- {name: shm, mountPath: /dev/shm}
{{- end }}
{{- with .values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "baton.volumes" -}}
{{- if and .weights .root.Values.weights.enabled -}}
- name: weights
  persistentVolumeClaim: {claimName: {{ include "baton.claim" .root }}, readOnly: true}
{{ end }}
{{- if .cluster -}}
- name: cluster-secret
  secret: {secretName: {{ .root.Values.secrets.cluster }}, defaultMode: 0440}
{{ end }}
{{- if .keys -}}
- name: api-keys  # routers follow its changes
  secret: {secretName: {{ .root.Values.secrets.apiKeys }}, defaultMode: 0440}
{{ with .root.Values.secrets.tls -}}
- name: tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{ end -}}
{{ end -}}
- name: tmp
  emptyDir: {sizeLimit: {{ .tmp }}}
{{- with .shm }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ . }}}
{{- end }}
{{- with .values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Takes the root. The pod of a router. */}}
{{- define "baton.router" -}}
{{- include "baton.pod" (dict
  "root" . "component" "router" "values" .Values.router "container" "baton.router.container" "account" "router"
  "token" true "settings" true "weights" true "cluster" true "keys" true "tmp" "1Gi") -}}
{{- end }}

{{- define "baton.router.container" -}}
name: router
image: {{ include "baton.image" . }}
args:
  - router
  - "--host=::"
  - --port=8000
  - --grpc-port=8001
  - "--advanced.admin-host=::"
  - --admin-port=8002
  {{- range include "baton.workers" .root | splitList " " }}
  - --kubernetes-service={{ include "baton.fullname" $.root }}-{{ . }}
  {{- end }}
  - --cluster-secret-file=/etc/baton/cluster/secret
  - --api-key-file=/etc/baton/api-keys/keys.toml
  {{- if .root.Values.secrets.tls }}
  - --ssl-certfile=/etc/baton/tls/tls.crt
  - --ssl-keyfile=/etc/baton/tls/tls.key
  {{- end }}
  {{- with .values.args }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
ports:
  - {name: http, containerPort: 8000}
  - {name: grpc, containerPort: 8001}
  - {name: metrics, containerPort: 8002}
# Clients cannot fill the admin port. A router is healthy without workers: it lets requests wait.
startupProbe:
  httpGet: {path: /health, port: 8002}
  periodSeconds: 1
  failureThreshold: 120
readinessProbe:
  httpGet: {path: /routable, port: 8002}  # no requests for a router that reaches none of the listed workers
  periodSeconds: 2
livenessProbe:
  httpGet: {path: /health, port: 8002}
  periodSeconds: 10
  timeoutSeconds: 5
lifecycle:
  preStop:
    sleep: {seconds: 5}  # until clients open no more connections to this pod
{{- end }}

{{/* Takes (list $ role). The pod of a worker. In a group, decode workers prefer the zone of prefill workers. */}}
{{- define "baton.worker" -}}
{{- $root := first . -}}
{{- $values := get $root.Values (last .) -}}
{{- $pod := dict
  "root" $root "component" (last .) "values" $values "container" "baton.worker.container" "account" "worker"
  "settings" true "podIP" true "weights" true "cluster" true "tmp" "8Gi" "shm" (default "1Gi" $values.sharedMemory) -}}
{{- if and (eq (last .) "decode") (eq $root.Values.workload "RoleBasedGroup") -}}
{{- $_ := set $pod "affinity" (include "baton.worker.affinity" $root) -}}
{{- end -}}
{{- include "baton.pod" $pod -}}
{{- end }}

{{- define "baton.worker.affinity" -}}
podAffinity:
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      podAffinityTerm:
        topologyKey: topology.kubernetes.io/zone
        labelSelector: {{ include "baton.pods" (list . "prefill") }}
{{- end }}

{{/* Takes (list $ values), those of a worker. A group has ports of their own for each of its workers: with numbers that no other port has. */}}
{{- define "baton.worker.ports" -}}
{{- $size := include "baton.told" (list (first .) (last .) "data-parallel-size" 1) | int -}}
{{- $first := eq $size 1 | ternary (dict "grpc" 7001 "kv" 7002 "metrics" 7003) (dict "grpc" 7100 "kv" 7200 "metrics" 7300) -}}
{{- $found := list -}}
{{- range $name := list "grpc" "kv" "metrics" -}}
{{- range $rank := until $size -}}
{{- $named := eq $rank 0 | ternary $name (printf "%s-%d" $name $rank) -}}
{{- $found = append $found (dict "name" $named "port" (add (get $first $name) $rank)) -}}
{{- end -}}
{{- end -}}
{{- dict "first" $first "all" $found | toJson -}}
{{- end }}

{{/* Takes (list $ name): the ports of this name of all workers, for a policy. */}}
{{- define "baton.worker.policy" -}}
{{- $name := last . -}}
{{- $found := dict -}}
{{- range $role := include "baton.workers" (first $) | splitList " " -}}
{{- $ports := include "baton.worker.ports" (list (first $) (get (first $).Values $role)) | fromJson -}}
{{- $port := get $ports.first $name | int -}}
{{- $size := div (len $ports.all) 3 | int -}}
{{- $end := eq $size 1 | ternary "" (printf " endPort: %d," (sub (add $port $size) 1)) -}}
{{- $_ := set $found (printf "- {port: %d,%s protocol: TCP}" $port $end) "" -}}
{{- end -}}
{{- keys $found | sortAlpha | join "\n" -}}
{{- end }}

{{- define "baton.worker.container" -}}
{{- $ports := include "baton.worker.ports" (list .root .values) | fromJson -}}
name: worker
image: {{ include "baton.image" . }}
{{- with .values.command }}
command: {{- toYaml . | nindent 2 }}
{{- end }}
args:
  - {{ .component }}
  - --host=$(POD_IP)
  - --port={{ $ports.first.grpc }}
  - --kv-port={{ $ports.first.kv }}
  - --metrics-port={{ $ports.first.metrics }}
  - --cluster-secret-file=/etc/baton/cluster/secret
  {{- with .values.args }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
ports:
  {{- range $ports.all }}
  - {name: {{ .name }}, containerPort: {{ .port }}}
  {{- end }}
startupProbe:  # not on the gRPC port: a kubelet cannot prove the cluster secret
  httpGet: {path: /health, port: {{ $ports.first.metrics }}}
  periodSeconds: 1
  failureThreshold: 1800  # time to load the weights
readinessProbe:
  httpGet: {path: /health, port: {{ $ports.first.metrics }}}
  periodSeconds: 1  # determines how soon routers see a change
livenessProbe:  # not for a hung engine: that ends the worker (--failure-timeout)
  httpGet: {path: /health, port: {{ $ports.first.metrics }}}
  periodSeconds: 10
  timeoutSeconds: 5
lifecycle:
  preStop:
    sleep: {seconds: 2}  # until routers have removed this pod from their lists
{{- end }}
