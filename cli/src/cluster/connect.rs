//! Connection to the cluster, and human-readable errors for its responses.

use std::path::PathBuf;
use std::time::Duration;

use kube::api::{Api, DynamicObject, ListParams};
use kube::config::{AuthInfo, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::core::{ApiResource, Status};
use kube::{Client, Config};
use serde::de::DeserializeOwned;
use serde_json::Value;
use stoker_api::experiment::Experiment;
use stoker_api::names::API_VERSION;
use stoker_api::trial::Trial;

use super::proxy;
use super::resource::ClusterResource;
use crate::failure::Failure;
use crate::print;

/// Timeout for connecting to the API server.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest time without data on a connection while a response is due. All watches end sooner.
const READ_TIMEOUT: Duration = Duration::from_secs(300);
/// CA certificate of the API server in pods.
const SERVICE_CA: &str = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt";
/// Objects per page of a list request.
const PAGE_SIZE: u32 = 500;

/// Flags that select cluster and namespace.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct Options {
    /// Kubeconfig file [default: files of KUBECONFIG, else ~/.kube/config, else the pod's service
    /// account]
    #[arg(long, value_name = "FILE", help_heading = "Cluster")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// Kubeconfig context [default: the current context]
    #[arg(long, value_name = "NAME", help_heading = "Cluster")]
    pub(crate) context: Option<String>,
    /// Namespace [default: the namespace of the context, else `default`]
    #[arg(long, short, value_name = "NAME", help_heading = "Cluster")]
    pub(crate) namespace: Option<String>,
}

impl Options {
    /// Returns `true` if a flag, a kubeconfig or the pod's environment selects a cluster.
    pub(crate) fn selects_cluster(&self) -> bool {
        self.kubeconfig.is_some()
            || self.context.is_some()
            || self.namespace.is_some()
            || environment("KUBECONFIG").is_some()
            || home_kubeconfig().is_some()
            || environment("KUBERNETES_SERVICE_HOST").is_some()
    }
}

/// Client of a cluster.
#[derive(Clone)]
pub(crate) struct Cluster {
    pub(crate) client: Client,
    /// Namespace of all requests, except lists of all namespaces.
    pub(crate) namespace: String,
    /// Address of the API server.
    pub(crate) server: String,
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Cluster({}, {})", self.server, self.namespace)
    }
}

impl Cluster {
    /// Reads the configuration. Sends no request.
    pub(crate) async fn connect(options: &Options) -> Result<Self, Failure> {
        Self::with_config(config(options).await?, options)
    }

    /// Reads the address and the CA of the cluster without any credentials. In a pod, this needs
    /// the CA certificate only, not the token of a service account.
    pub(crate) async fn connect_without_user(options: &Options) -> Result<Self, Failure> {
        let mut config = match kubeconfig(options)? {
            Some(_) => config(options).await?,
            None => in_cluster_without_user()?,
        };
        config.auth_info = AuthInfo::default();
        Self::with_config(config, options)
    }

    fn with_config(mut config: Config, options: &Options) -> Result<Self, Failure> {
        config.connect_timeout = Some(CONNECT_TIMEOUT);
        // Ends responses on silently broken connections. Each request restarts the timeout.
        config.read_timeout = Some(READ_TIMEOUT);
        config.reset_reader_on_write = true;
        if config.proxy_url.is_some() && proxy::is_bypassed(config.cluster_url.host()) {
            config.proxy_url = None;
        }
        let server = config.cluster_url.to_string().trim_end_matches('/').to_owned();
        let namespace =
            options.namespace.clone().unwrap_or_else(|| config.default_namespace.clone());
        let client = Client::try_from(config).map_err(|error| {
            Failure::Input(format!("cannot use the kubeconfig for {server}: {}", chain(&error)))
        })?;
        Ok(Self { client, namespace, server })
    }

    /// Returns a client for another namespace of the same cluster.
    pub(crate) fn in_namespace(&self, namespace: &str) -> Self {
        Self { namespace: namespace.to_owned(), ..self.clone() }
    }

    /// Returns the API of a kind in the namespace.
    pub(crate) fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = kube::core::NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Reads an experiment or a job.
    pub(crate) async fn read<K: ClusterResource>(&self, name: &str) -> Result<K, Failure> {
        self.request(&format!("{} `{name}`", K::KIND_NAME), self.api::<K>().get(name)).await
    }

    /// Reads an experiment.
    pub(crate) async fn experiment(&self, name: &str) -> Result<Experiment, Failure> {
        self.read(name).await
    }

    /// Reads a trial.
    pub(crate) async fn trial(&self, name: &str) -> Result<Trial, Failure> {
        self.request(&format!("trial `{name}`"), self.api::<Trial>().get(name)).await
    }

    /// Lists all matching objects of a kind, each also as the JSON that the server sent. Prints a
    /// warning for objects that this version cannot parse, and skips them.
    pub(crate) async fn list<K>(
        &self,
        target: &str,
        params: &ListParams,
        is_everywhere: bool,
    ) -> Result<Vec<(K, Value)>, Failure>
    where
        K: kube::Resource<DynamicType = ()> + DeserializeOwned,
    {
        let resource = ApiResource::erase::<K>(&());
        let api: Api<DynamicObject> = match is_everywhere {
            true => Api::all_with(self.client.clone(), &resource),
            false => Api::namespaced_with(self.client.clone(), &self.namespace, &resource),
        };
        let mut objects = Vec::new();
        let mut page = params.clone().limit(PAGE_SIZE);
        loop {
            let list = self.request(target, api.list(&page)).await?;
            for object in list.items {
                let name = object.metadata.name.clone().unwrap_or_default();
                let mut value = serde_json::to_value(object)
                    .map_err(|error| Failure::System(error.to_string()))?;
                // The items of a list lack `apiVersion` and `kind`.
                value["apiVersion"] = K::api_version(&()).into();
                value["kind"] = K::kind(&()).into();
                match serde_json::from_value(value.clone()) {
                    Ok(object) => objects.push((object, value)),
                    Err(error) => print::err(format!("stoker: skipped {name}: {error}")),
                }
            }
            match list.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => page.continue_token = Some(token),
                None => return Ok(objects),
            }
        }
    }

    /// Describes the error of a request. `target` is the requested object, such as "jobs".
    pub(crate) fn failure(&self, target: &str, error: kube::Error) -> Failure {
        match error {
            kube::Error::Api(status) => self.refusal(target, &status),
            kube::Error::SerdeError(error) => Failure::System(format!(
                "cannot parse {target}: {error}; check that client and cluster versions match \
                 with `stoker version`"
            )),
            kube::Error::Service(error) => self.unreachable(&chain(error.as_ref())),
            error => self.unreachable(&chain(&error)),
        }
    }

    fn unreachable(&self, why: &str) -> Failure {
        Failure::System(format!("cannot reach the cluster at {}: {why}", self.server))
    }

    fn refusal(&self, target: &str, status: &Status) -> Failure {
        let details = status.details.as_ref();
        let is_named = details.is_some_and(|details| !details.name.is_empty());
        let message = status.message.trim();
        // For an unknown kind, the server responds in plain text, without a reason.
        let is_missing = status.code == 404;
        if is_missing && details.is_some_and(|details| details.kind == "namespaces") {
            let namespace = &self.namespace;
            return Failure::Input(format!(
                "namespace `{namespace}` not found in the cluster at {}; create it with `kubectl \
                 create namespace {namespace}` or choose another with --namespace",
                self.server
            ));
        }
        if is_missing && is_named {
            return Failure::Input(format!(
                "{target} not found in namespace `{}` of the cluster at {}; for local runs, add \
                 --root",
                self.namespace, self.server
            ));
        }
        if is_missing {
            return Failure::System(format!(
                "Stoker is not installed in the cluster at {}: {API_VERSION} not found; install \
                 it with `helm install stoker charts/stoker --namespace stoker --create-namespace`",
                self.server
            ));
        }
        if status.is_forbidden() {
            return Failure::System(format!(
                "permission denied by the cluster at {}: {message}",
                self.server
            ));
        }
        if status.code == 401 {
            return Failure::System(format!(
                "authentication failed for the cluster at {}: {message}; check the user of the \
                 kubeconfig context",
                self.server
            ));
        }
        if status.is_invalid() {
            return Failure::Input(format!("the cluster rejected {target}: {}", causes(status)));
        }
        Failure::System(format!(
            "request for {target} failed: the cluster at {} returned {}: {message}",
            self.server, status.code
        ))
    }
}

/// Returns why an object was rejected, by field.
fn causes(status: &Status) -> String {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    let lines: Vec<String> = causes
        .map(|cause| {
            // Omit the value of the object, which precedes the message of a CEL rule.
            let message = cause.message.as_str();
            let rule = message.rsplit_once("\": ").map_or(message, |(_, rule)| rule);
            match cause.field.as_str() {
                "" | "<nil>" => rule.to_owned(),
                field => format!("{field}: {}", rule.trim_start_matches("Invalid value: ")),
            }
        })
        .collect();
    if lines.is_empty() { status.message.clone() } else { lines.join("; ") }
}

/// Formats an error with its chain of sources.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let more = error.to_string();
        // Skip sources that the error text already contains.
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        source = error.source();
    }
    text
}

async fn config(options: &Options) -> Result<Config, Failure> {
    let Some(kubeconfig) = kubeconfig(options)? else {
        return in_cluster(options);
    };
    let choice = KubeConfigOptions { context: options.context.clone(), ..Default::default() };
    Config::from_custom_kubeconfig(kubeconfig, &choice).await.map_err(|error| match error {
        KubeconfigError::CurrentContextNotSet => Failure::Input(
            "the kubeconfig has no current context; set one with --context or `kubectl config \
             use-context NAME`"
                .to_owned(),
        ),
        KubeconfigError::LoadContext(name) => Failure::Input(format!(
            "context `{name}` not found in the kubeconfig; `kubectl config get-contexts` lists the \
             contexts"
        )),
        other => Failure::Input(format!("cannot use the kubeconfig: {}", chain(&other))),
    })
}

fn in_cluster(options: &Options) -> Result<Config, Failure> {
    if environment("KUBERNETES_SERVICE_HOST").is_none() {
        return Err(Failure::Input(
            "no cluster: kubeconfig not found; set --kubeconfig or KUBECONFIG, or create \
             ~/.kube/config"
                .to_owned(),
        ));
    }
    if let Some(context) = &options.context {
        return Err(Failure::Input(format!(
            "cannot use --context {context}: kubeconfig not found, and a pod's service account \
             has no contexts; set --kubeconfig or omit --context"
        )));
    }
    Config::incluster().map_err(|error| {
        Failure::System(format!("cannot use the pod's service account: {}", chain(&error)))
    })
}

/// Returns the API server of the pod's environment, with the CA certificate of the service account.
fn in_cluster_without_user() -> Result<Config, Failure> {
    let of = |name: &str| {
        let value = environment(name).map(|value| value.to_string_lossy().into_owned());
        value.ok_or_else(|| {
            Failure::Input(format!(
                "no cluster: neither a kubeconfig nor the environment variable {name} of a pod; \
                 set --kubeconfig"
            ))
        })
    };
    let (host, port) = (of("KUBERNETES_SERVICE_HOST")?, of("KUBERNETES_SERVICE_PORT")?);
    let host = if host.contains(':') { format!("[{host}]") } else { host };
    let url = format!("https://{host}:{port}");
    let url = url.parse().map_err(|error| {
        Failure::Input(format!("the address of the API server, {url}, is not a URL: {error}"))
    })?;
    let ca = PathBuf::from(SERVICE_CA);
    std::fs::metadata(&ca).map_err(|error| Failure::file("read", &ca, error))?;
    let mut config = Config::new(url);
    config.root_cert_file = Some(ca);
    Ok(config)
}

/// Reads the kubeconfig: `--kubeconfig`, else the merged files of `KUBECONFIG`, else
/// `~/.kube/config`.
fn kubeconfig(options: &Options) -> Result<Option<Kubeconfig>, Failure> {
    let read = |path: &PathBuf| {
        Kubeconfig::read_from(path).map_err(|error| {
            let path = path.display();
            Failure::Input(format!("cannot read the kubeconfig {path}: {}", chain(&error)))
        })
    };
    if let Some(path) = &options.kubeconfig {
        return read(path).map(Some);
    }
    let Some(list) = environment("KUBECONFIG") else {
        return home_kubeconfig().as_ref().map(read).transpose();
    };
    // Like kubectl, skip missing files of the list.
    let paths: Vec<PathBuf> = std::env::split_paths(&list).filter(|path| path.is_file()).collect();
    let mut merged: Option<Kubeconfig> = None;
    for path in &paths {
        let next = read(path)?;
        merged = Some(match merged {
            None => next,
            Some(first) => first.merge(next).map_err(|error| {
                let path = path.display();
                Failure::Input(format!("cannot merge the kubeconfig {path}: {}", chain(&error)))
            })?,
        });
    }
    if merged.is_none() {
        let list = list.to_string_lossy();
        return Err(Failure::Input(format!(
            "no file of KUBECONFIG exists ({list}); correct it or set --kubeconfig"
        )));
    }
    Ok(merged)
}

fn home_kubeconfig() -> Option<PathBuf> {
    let path = PathBuf::from(environment("HOME")?).join(".kube/config");
    path.is_file().then_some(path)
}

fn environment(name: &str) -> Option<std::ffi::OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(value: Value) -> Failure {
        let cluster = Cluster {
            client: unused_client(),
            namespace: "ml".to_owned(),
            server: "https://here:6443".to_owned(),
        };
        let status: Status = serde_json::from_value(value).unwrap();
        cluster.failure("experiment `mnist`", kube::Error::Api(Box::new(status)))
    }

    /// Returns a client that sends no request in these tests.
    fn unused_client() -> Client {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let _guard = runtime.enter();
        let mut config = Config::new("http://127.0.0.1:1".parse().unwrap());
        config.default_retry = false;
        Client::try_from(config).unwrap()
    }

    fn check(value: Value, code: u8, expected: &str) {
        let failure = refusal(value);
        let text = failure.to_string();
        assert!(text.contains(expected), "{text}");
        assert_eq!(failure.code(), code, "{text}");
    }

    #[test]
    fn rule_messages_are_shown_without_the_value() {
        let status = |message: &str| -> Status {
            let cause = serde_json::json!({"field": "spec", "message": message});
            serde_json::from_value(serde_json::json!({"details": {"causes": [cause]}})).unwrap()
        };
        assert_eq!(causes(&status("Invalid value: it stays killed")), "spec: it stays killed");
        assert_eq!(causes(&status("Invalid value: \"object\": no")), "spec: no");
        assert_eq!(causes(&status("Required value")), "spec: Required value");
    }

    #[test]
    fn api_server_errors_have_text_and_code() {
        check(
            serde_json::json!({"code": 404, "reason": "NotFound", "message": "no",
                "details": {"name": "mnist", "kind": "experiments"}}),
            2,
            "experiment `mnist` not found in namespace `ml` of the cluster at https://here:6443",
        );
        check(
            serde_json::json!({"code": 404, "message": "404 page not found"}),
            1,
            "Stoker is not installed in the cluster at https://here:6443",
        );
        check(
            serde_json::json!({"code": 404, "reason": "NotFound", "message": "no",
                "details": {"name": "ml", "kind": "namespaces"}}),
            2,
            "kubectl create namespace ml",
        );
        check(
            serde_json::json!({"code": 403, "reason": "Forbidden", "message": "User x cannot"}),
            1,
            "permission denied by the cluster at https://here:6443: User x cannot",
        );
        let unauthorized = serde_json::json!({"code": 401, "message": "Unauthorized"});
        check(unauthorized, 1, "authentication failed");
        check(
            serde_json::json!({"code": 422, "reason": "Invalid", "message": "all of it",
            "details": {"name": "mnist", "causes": [
                {"field": "spec", "message": "Invalid value: \"object\": it stays killed"},
            ]}}),
            2,
            "rejected experiment `mnist`: spec: it stays killed",
        );
        check(serde_json::json!({"code": 500, "message": "oh"}), 1, "returned 500: oh");
    }
}
