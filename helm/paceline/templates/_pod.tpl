{{/* (root, role, values) -> the pod template of a role; role "head" is Ray's head with router and Control. */}}
{{- define "paceline.podTemplate" -}}
{{- $root := .root -}}{{- $role := .role -}}{{- $values := .values -}}{{- $pod := $values.pod -}}
{{- $drain := include "paceline.drain" $root | int -}}
{{- /* Serve ends a replica that cannot be replaced this long before the time is up: drain_s and 8. The rest is for a new one. */ -}}
{{- $leave := add $drain 60 -}}
{{- $isEngine := not (has $role (list "head" "gateway")) -}}
{{- $weightsClaim := include "paceline.weightsClaim" $root -}}
{{- $stateClaim := include "paceline.stateClaim" $root -}}
metadata:
  labels:
    {{- include "paceline.selector" $root | nindent 4 }}
    paceline/role: {{ $role }}
    {{- with $pod.labels }}{{ toYaml . | nindent 4 }}{{- end }}
  {{- with $pod.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "paceline.serviceAccount" $root }}
  automountServiceAccountToken: {{ and (eq $role "head") $root.Values.autoscaler.enabled }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ add (ternary $leave $drain $isEngine) 30 }}
  securityContext:
    runAsNonRoot: true
    runAsUser: {{ int $root.Values.user }}
    runAsGroup: {{ int $root.Values.user }}
    fsGroup: {{ int $root.Values.user }}
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pod.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pod.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pod.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pod.topologySpreadConstraints }}
  topologySpreadConstraints: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pod.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- if $root.Values.weights.url }}
  initContainers:
    - name: weights
      image: {{ include "paceline.image" (dict "root" $root "pod" $pod) }}
      imagePullPolicy: {{ default $root.Values.image.pullPolicy (default dict $pod.image).pullPolicy }}
      # Gateways and the router need tokenizers and shapes, not the weights themselves.
      command: [python, -m, paceline.deploy.fetch, {{ $root.Values.weights.url | quote }}, /weights{{ if not $isEngine }}, --no-weights{{ end }}]
      {{- include "paceline.environment" (dict "root" $root "pod" $pod "role" $role) | nindent 6 }}
      securityContext: {{- include "paceline.containerSecurity" $root | nindent 8 }}
      resources: {requests: {cpu: 100m, memory: 512Mi}, limits: {memory: 1Gi}}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: weights, mountPath: /weights}
  {{- end }}
  containers:
    - name: {{ if eq $role "head" }}ray-head{{ else }}ray-worker{{ end }}
      image: {{ include "paceline.image" (dict "root" $root "pod" $pod) }}
      imagePullPolicy: {{ default $root.Values.image.pullPolicy (default dict $pod.image).pullPolicy }}
      {{- include "paceline.environment" (dict "root" $root "pod" $pod "role" $role) | nindent 6 }}
      {{- if eq $role "head" }}
      ports:
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: control, containerPort: {{ dig "port" 8001 $root.Values.control | int }}}
      {{- else if eq $role "gateway" }}
      ports:
        - {name: http, containerPort: {{ dig "port" 8000 $values | int }}}
      {{- end }}
      {{- if eq $role "gateway" }}
      readinessProbe: # a gateway is ready when a decode worker is
        httpGet: {path: /ready, port: http}
        periodSeconds: 2
        timeoutSeconds: 2
        failureThreshold: 2
      {{- else if ne $role "head" }}
      readinessProbe: # without it KubeRay would ask for Serve's own proxy, which is not used
        httpGet: {path: /api/healthz, port: 52365}
        periodSeconds: 5
        timeoutSeconds: 3
        failureThreshold: 3
      {{- end }}
      lifecycle:
        preStop:
          exec:
            {{- if eq $role "gateway" }} # the Service must stop sending, and streams that are open end
            command: [python, -m, paceline.deploy.linger, "{{ dig "port" 8000 $values | int }}", "{{ $drain }}", "{{ dig "notice_s" 6 $values }}"]
            {{- else if $isEngine }} # replicas are replaced elsewhere if there is room, then hand their streams over
            command: [paceline, drain, --limit-s, "{{ $leave }}"]
            {{- else }}
            command: [sleep, "{{ $drain }}"]
            {{- end }}
      securityContext: {{- include "paceline.containerSecurity" $root | nindent 8 }}
      resources: {{- include "paceline.resources" . | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: home, mountPath: /home/paceline}
        {{- if not $isEngine }}
        - {name: keys, mountPath: /etc/paceline/keys, readOnly: true}
        {{- end }}
        {{- if or $root.Values.weights.url $weightsClaim }}
        - {name: weights, mountPath: /weights, readOnly: true}
        {{- end }}
        {{- if $stateClaim }}
        - {name: state, mountPath: /state}
        {{- end }}
  volumes:
    - {name: tmp, emptyDir: {}}
    - {name: home, emptyDir: {}}
    {{- if not $isEngine }} # gateways check them, Control knows from them whose tenants consented
    - name: keys
      secret: {secretName: {{ include "paceline.keysSecret" $root }}, items: [{key: keys.json, path: keys.json}]}
    {{- end }}
    {{- if $root.Values.weights.url }}
    - {name: weights, emptyDir: {}}
    {{- else if $weightsClaim }}
    - {name: weights, persistentVolumeClaim: {claimName: {{ $weightsClaim }}}}
    {{- end }}
    {{- if $stateClaim }}
    - {name: state, persistentVolumeClaim: {claimName: {{ $stateClaim }}}}
    {{- end }}
{{- end -}}

{{- define "paceline.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* The environment of Ray's processes, which replicas inherit: see deploy/local.py. */}}
{{- define "paceline.environment" -}}
env:
  - {name: HOME, value: /home/paceline}
  - {name: RAY_USAGE_STATS_ENABLED, value: "0"}
  - {name: RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO, value: "0"}
  - {name: RAY_worker_niceness, value: "0"}
  {{- if eq .role "head" }}
  - name: PACELINE_ADMIN_KEY
    valueFrom: {secretKeyRef: {name: {{ include "paceline.adminSecret" .root }}, key: admin-key}}
  {{- end }}
  {{- with .pod.env }}{{ toYaml . | nindent 2 }}{{- end }}
{{- with .root.Values.secrets.env }}
envFrom:
  {{- range . }}
  - {secretRef: {name: {{ . }}}}
  {{- end }}
{{- end }}
{{- end -}}

{{/* The pod's resources, and the GPUs of its replicas. */}}
{{- define "paceline.resources" -}}
{{- $resources := deepCopy .values.pod.resources -}}
{{- $gpus := mulf (default 0 .values.num_gpus) (default 1 .values.pod.replicas) (default 1 .values.tp) | ceil | int -}}
{{- if gt $gpus 0 -}}
{{- $gpu := dict .values.pod.gpuResource $gpus -}}
{{- $resources = mergeOverwrite $resources (dict "limits" (mergeOverwrite (deepCopy (default dict $resources.limits)) $gpu)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
