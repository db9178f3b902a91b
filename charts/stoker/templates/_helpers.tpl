{{/* Prefix of object names: the release name, with "stoker" appended unless it contains it. */}}
{{- define "stoker.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" (.Release.Name | trunc 33 | trimSuffix "-") .Chart.Name -}}
{{- end -}}
{{- end -}}

{{- define "stoker.operator" -}}
{{ include "stoker.fullname" . }}-operator
{{- end -}}

{{/* Name of cluster-scoped objects; the namespace keeps it unique if releases share a name. */}}
{{- define "stoker.clusterName" -}}
{{ .Release.Namespace }}:{{ include "stoker.operator" . }}
{{- end -}}

{{- define "stoker.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "stoker.labels" -}}
{{ include "stoker.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "stoker.ui" -}}
{{ include "stoker.fullname" . }}-ui
{{- end -}}

{{- define "stoker.uiSelector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: ui
{{- end -}}

{{- define "stoker.uiLabels" -}}
{{ include "stoker.uiSelector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "stoker.uiImage" -}}
{{- if .Values.ui.image.digest -}}
{{ .Values.ui.image.repository }}@{{ .Values.ui.image.digest }}
{{- else -}}
{{ .Values.ui.image.repository }}:{{ .Values.ui.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "stoker.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "stoker.trainerImage" -}}
{{- if .Values.trainer.image -}}
{{ .Values.trainer.image }}
{{- else if .Values.trainer.digest -}}
{{ .Values.trainer.repository }}@{{ .Values.trainer.digest }}
{{- else -}}
{{ .Values.trainer.repository }}:{{ .Values.trainer.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* DNS name of the report server, in its certificate and in the trainers' configuration. */}}
{{- define "stoker.doorHost" -}}
stoker-door.{{ .Release.Namespace }}.svc
{{- end -}}

{{- define "stoker.tlsSecret" -}}
{{- .Values.tls.existingSecret | default (printf "%s-door" (include "stoker.fullname" .)) -}}
{{- end -}}

{{- define "stoker.gangSecret" -}}
{{- .Values.gangKey.existingSecret | default (printf "%s-gang" (include "stoker.fullname" .)) -}}
{{- end -}}

{{/*
Sets .stokerSecrets = {tls, gang}: the base64 data of the two Secrets, from the cluster or newly
generated. Runs once per rendering, even if included several times, so that checksums match the
stored data.
*/}}
{{- define "stoker.secrets" -}}
{{- if not (hasKey . "stokerSecrets") -}}
{{- $tls := (lookup "v1" "Secret" .Release.Namespace (include "stoker.tlsSecret" .)).data | default dict -}}
{{- if and (not .Values.tls.existingSecret) (not (and (get $tls "ca.crt") (get $tls "tls.crt") (get $tls "tls.key"))) -}}
{{- $host := include "stoker.doorHost" . -}}
{{- $authority := genCA "stoker-door-ca" 3650 -}}
{{- $names := list $host (printf "%s.cluster.local" $host) -}}
{{- $door := genSignedCert "stoker-door" nil $names 3650 $authority -}}
{{- $tls = dict "ca.crt" ($authority.Cert | b64enc) "tls.crt" ($door.Cert | b64enc) "tls.key" ($door.Key | b64enc) -}}
{{- end -}}
{{- $gang := (lookup "v1" "Secret" .Release.Namespace (include "stoker.gangSecret" .)).data | default dict -}}
{{- if and (not .Values.gangKey.existingSecret) (not (get $gang "key")) -}}
{{- $gang = dict "key" (randAlphaNum 64 | b64enc) -}}
{{- end -}}
{{- $_ := set . "stokerSecrets" (dict "tls" $tls "gang" $gang) -}}
{{- end -}}
{{- end -}}
