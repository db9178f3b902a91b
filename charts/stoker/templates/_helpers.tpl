{{/* What the objects' names begin with: the release's name, with "stoker" in it once. */}}
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

{{/* Names of objects that have no namespace: two releases of one name in two namespaces do not meet. */}}
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

{{- define "stoker.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "stoker.trainerImage" -}}
{{- .Values.trainer.image | default (printf "localhost/stoker-trainer:%s" .Chart.AppVersion) -}}
{{- end -}}

{{/* The door's name in the cluster. Trainers are told it, and its certificate is for it. */}}
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
Sets .stokerSecrets = {tls, gang}: the data of the two Secrets, base64, as they are in the cluster or as made now.
Made once a rendering, however often it is included: a checksum taken of it is of what is stored.
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
