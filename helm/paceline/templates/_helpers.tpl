{{/* Names: at most 47 characters, KubeRay's limit for what it derives names from. */}}
{{- define "paceline.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 47 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 47 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 47 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "paceline.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "paceline.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "paceline.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "paceline.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "paceline.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "paceline.keysSecret" -}}
{{- default (printf "%s-keys" (include "paceline.fullname" .)) .Values.secrets.keys -}}
{{- end -}}
{{- define "paceline.adminSecret" -}}
{{- default (printf "%s-admin" (include "paceline.fullname" .)) .Values.secrets.admin -}}
{{- end -}}

{{/* (root, pod) -> the image of a pod. */}}
{{- define "paceline.image" -}}
{{- $image := mergeOverwrite (deepCopy .root.Values.image) (default dict .pod.image) -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository (default .root.Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Seconds in which a gateway's streams may end: the preset's, unless it is said. */}}
{{- define "paceline.drain" -}}
{{- dig "drain_s" 60 .Values.gateway | int -}}
{{- end -}}

{{/* Roles with pods of their own, as a JSON list: those with replicas; the trainer only where something is learned. */}}
{{- define "paceline.roles" -}}
{{- $roles := list "gateway" -}}
{{- range $role := list "prefill" "decode" "draft" -}}
{{- if gt (int (index $.Values $role).replicas) 0 -}}{{- $roles = append $roles $role -}}{{- end -}}
{{- end -}}
{{- if and .Values.learning.enabled (gt (int .Values.trainer.replicas) 0) -}}{{- $roles = append $roles "trainer" -}}{{- end -}}
{{- toJson $roles -}}
{{- end -}}

{{/* The file that `serve deploy` reads: Paceline's configuration without the pods. */}}
{{- define "paceline.serveConfig" -}}
{{- $tree := dict "preset" .Values.preset -}}
{{- range $section := list "model" "gateway" "router" "prefill" "decode" "draft" "trainer" "control" "speculation" "link" "kv" "limits" "learning" "telemetry" -}}
{{- $fields := omit (default dict (index $.Values $section)) "pod" -}}
{{- if $fields -}}{{- $_ := set $tree $section $fields -}}{{- end -}}
{{- end -}}
{{- $_ := set $tree "gateway" (mergeOverwrite (dict "keys_file" "/etc/paceline/keys/keys.json") (default dict $tree.gateway)) -}}
{{- /* How many there are is said where Serve changes it without a restart. */ -}}
{{- $scaled := list -}}
{{- range $role := list "prefill" "decode" "draft" -}}
{{- $values := index $.Values $role -}}
{{- if gt (int $values.replicas) 0 -}}
{{- $howMany := dict "num_replicas" (int $values.replicas) -}}
{{- if gt (int $values.max_replicas) 0 -}}
{{- $howMany = dict "autoscaling_config" (include "paceline.autoscaling" (dict "values" $values "scaling" $.Values.scaling) | fromYaml) -}}
{{- end -}}
{{- $scaled = append $scaled (merge (dict "name" $role) $howMany) -}}
{{- $_ := set $tree $role (omit (index $tree $role) "replicas" "max_replicas") -}}
{{- end -}}
{{- end -}}
{{- $app := dict "name" "paceline" "import_path" "paceline.deploy.serve_config:build" "route_prefix" nil "args" (dict "config" $tree) "deployments" $scaled -}}
{{- toYaml (dict "proxy_location" "Disabled" "applications" (list $app)) -}}
{{- end -}}

{{/* (values of a role, scaling) -> how Serve follows its load: deploy/serve_config.py writes the same. */}}
{{- define "paceline.autoscaling" -}}
min_replicas: {{ int .values.replicas }}
max_replicas: {{ int .values.max_replicas }}
target_ongoing_requests: {{ dig "busy" 0.7 .scaling }}
upscale_delay_s: {{ dig "up_after_s" 10.0 .scaling }}
downscale_delay_s: {{ dig "down_after_s" 300.0 .scaling }}
look_back_period_s: 20.0
policy: {policy_function: "paceline.cluster.scaling:by_load"}
{{- end -}}

{{/* What the schema cannot see, because it is about several values. Each message names them. */}}
{{- define "paceline.check" -}}
{{- range $role := list "prefill" "decode" "draft" -}}
{{- $values := index $.Values $role -}}
{{- if gt (int $values.pod.min) (int $values.pod.max) -}}
{{- fail (printf "%s.pod.min=%d: expected at most %s.pod.max=%d" $role (int $values.pod.min) $role (int $values.pod.max)) -}}
{{- end -}}
{{- $most := max (int $values.replicas) (int $values.max_replicas) -}}
{{- $field := ternary "max_replicas" "replicas" (gt (int $values.max_replicas) 0) -}}
{{- $pods := include "paceline.pods" (dict "values" $values "replicas" $most) | int -}}
{{- if and $.Values.autoscaler.enabled (gt $pods (int $values.pod.max)) -}}
{{- fail (printf "%s.%s=%d: needs %d pods, expected at most %s.pod.max=%d" $role $field $most $pods $role (int $values.pod.max)) -}}
{{- end -}}
{{- if and (gt (int $values.max_replicas) 0) (or (lt (int $values.replicas) 1) (lt (int $values.max_replicas) (int $values.replicas))) -}}
{{- fail (printf "%s.max_replicas=%d: expected 0, or at least %s.replicas=%d, which is then 1 or more" $role (int $values.max_replicas) $role (int $values.replicas)) -}}
{{- end -}}
{{- end -}}
{{- $interface := default "node" .Values.link.interface -}}
{{- if or (hasPrefix "127." $interface) (has $interface (list "::1" "0.0.0.0" "::")) -}}
{{- fail (printf "link.interface=%s: expected node, or a network such as 10.1.0.0/16: pods must reach each other" $interface) -}}
{{- end -}}
{{- $gatewayHost := default "0.0.0.0" .Values.gateway.host -}}
{{- if or (hasPrefix "127." $gatewayHost) (has $gatewayHost (list "::1" "localhost")) -}}
{{- fail (printf "gateway.host=%s: expected an address that others reach, such as 0.0.0.0" $gatewayHost) -}}
{{- end -}}
{{- range $section := list "gateway" "control" -}}
{{- if (index $.Values $section).tls -}}
{{- fail (printf "%s.tls: expected nothing: in Kubernetes TLS ends at the Ingress, ingress.tlsSecret, or in a mesh" $section) -}}
{{- end -}}
{{- end -}}
{{- if regexMatch "^postgres(ql)?([+][a-z0-9]+)?://[^/@]*:[^/@]*@" (default "" .Values.learning.registry) -}}
{{- fail "learning.registry: expected no password in it, since the RayService would show it: PGPASSWORD in a Secret named in secrets.env" -}}
{{- end -}}
{{- if .Values.learning.enabled -}}
{{- $storage := default "auto" .Values.learning.storage -}}
{{- $registry := default "auto" .Values.learning.registry -}}
{{- if eq $storage "auto" -}}
{{- fail "learning.storage: expected a URL such as s3://bucket/folder, or /state/learning with a volume in `state`: every pod must see it" -}}
{{- end -}}
{{- if eq $registry "auto" -}}
{{- fail "learning.registry: expected postgresql://user@host/database, or sqlite:////state/registry.db with a volume in `state`" -}}
{{- end -}}
{{- if and (or (hasPrefix "/" $storage) (hasPrefix "sqlite" $registry)) (not (include "paceline.stateClaim" .)) -}}
{{- fail (printf "state.claim: expected a volume, since learning.storage=%s and learning.registry=%s are files" $storage $registry) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.weights.url (or .Values.weights.claim .Values.weights.create) -}}
{{- fail "weights.url: expected nothing beside weights.claim or weights.create: models come from one place" -}}
{{- end -}}
{{- $places := or .Values.weights.url (include "paceline.weightsClaim" .) -}}
{{- range $name := list "target" "draft" -}}
{{- if and (hasPrefix "/weights" (index $.Values.model $name)) (not $places) -}}
{{- fail (printf "model.%s=%s: expected weights.claim, weights.create or weights.url beside it" $name (index $.Values.model $name)) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.ingress.tlsSecret (not .Values.ingress.host) -}}
{{- fail "ingress.host: expected the name of the certificate in ingress.tlsSecret" -}}
{{- end -}}
{{- end -}}

{{/* (values of a role, replicas) -> pods that so many need. */}}
{{- define "paceline.pods" -}}
{{- $each := int (default 1 .values.pod.replicas) -}}
{{- div (add (int .replicas) (sub $each 1)) $each -}}
{{- end -}}

{{- define "paceline.weightsClaim" -}}
{{- if .Values.weights.create -}}{{ include "paceline.fullname" . }}-weights{{- else -}}{{ .Values.weights.claim }}{{- end -}}
{{- end -}}
{{- define "paceline.stateClaim" -}}
{{- if .Values.state.create -}}{{ include "paceline.fullname" . }}-state{{- else -}}{{ .Values.state.claim }}{{- end -}}
{{- end -}}
