//! Which cluster, and what its answers mean to people.

use std::future::Future;
use std::path::PathBuf;
use std::time::Duration;

use kube::api::{Api, DynamicObject, ListParams};
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::core::{ApiResource, Status};
use kube::{Client, Config};
use serde::de::DeserializeOwned;
use serde_json::Value;
use stoker_api::experiment::Experiment;
use stoker_api::names::API_VERSION;
use stoker_api::trial::Trial;

use super::kind::Kind;
use super::proxy;
use crate::failure::Failure;
use crate::print;

/// How long the API server may take to take a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long it may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// Objects of a list that are asked for at a time.
const PAGE: u32 = 500;

/// Which cluster and namespace.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct Options {
    /// The kubeconfig file [default: those of KUBECONFIG, or ~/.kube/config; in a pod, its service
    /// account]
    #[arg(long, value_name = "FILE", help_heading = "Cluster")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// The context of the kubeconfig [default: its current one]
    #[arg(long, value_name = "NAME", help_heading = "Cluster")]
    pub(crate) context: Option<String>,
    /// The namespace [default: the context's, or else `default`]
    #[arg(long, short, value_name = "NAME", help_heading = "Cluster")]
    pub(crate) namespace: Option<String>,
}

impl Options {
    /// Whether anything names a cluster: a flag, a kubeconfig, or the pod that this runs in.
    pub(crate) fn is_any(&self) -> bool {
        self.kubeconfig.is_some()
            || self.context.is_some()
            || self.namespace.is_some()
            || environment("KUBECONFIG").is_some()
            || home_kubeconfig().is_some()
            || environment("KUBERNETES_SERVICE_HOST").is_some()
    }
}

/// A cluster that can be asked.
#[derive(Clone)]
pub(crate) struct Cluster {
    pub(crate) client: Client,
    /// The namespace that is meant where none is said.
    pub(crate) namespace: String,
    /// The address of its API server.
    pub(crate) server: String,
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Cluster({}, {})", self.server, self.namespace)
    }
}

impl Cluster {
    /// Reads the configuration; nothing is sent yet.
    pub(crate) async fn connect(options: &Options) -> Result<Self, Failure> {
        let mut config = config(options).await?;
        config.connect_timeout = Some(CONNECT_TIMEOUT);
        if config.proxy_url.is_some() && proxy::is_bypassed(config.cluster_url.host()) {
            config.proxy_url = None;
        }
        let server = config.cluster_url.to_string().trim_end_matches('/').to_owned();
        let namespace =
            options.namespace.clone().unwrap_or_else(|| config.default_namespace.clone());
        let client = Client::try_from(config).map_err(|error| {
            Failure::Input(format!("the kubeconfig cannot be used for {server}: {}", chain(&error)))
        })?;
        Ok(Self { client, namespace, server })
    }

    /// The same cluster, in another namespace.
    pub(crate) fn within(&self, namespace: &str) -> Self {
        Self { namespace: namespace.to_owned(), ..self.clone() }
    }

    /// All objects of a kind in the namespace.
    pub(crate) fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = kube::core::NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// The experiment or job of this name.
    pub(crate) async fn read<K: Kind>(&self, name: &str) -> Result<K, Failure> {
        self.ask(&format!("{} `{name}`", K::WORD), self.api::<K>().get(name)).await
    }

    /// The experiment of this name.
    pub(crate) async fn experiment(&self, name: &str) -> Result<Experiment, Failure> {
        self.read(name).await
    }

    /// The trial of this name.
    pub(crate) async fn trial(&self, name: &str) -> Result<Trial, Failure> {
        self.ask(&format!("trial `{name}`"), self.api::<Trial>().get(name)).await
    }

    /// Waits for an answer about `asked`, such as "experiment `mnist`".
    pub(crate) async fn ask<T>(
        &self,
        asked: &str,
        call: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, Failure> {
        match tokio::time::timeout(ANSWER_TIMEOUT, call).await {
            Ok(answer) => answer.map_err(|error| self.failure(asked, error)),
            Err(_) => Err(Failure::System(format!(
                "the cluster at {} gave no answer about {asked} within {} s",
                self.server,
                ANSWER_TIMEOUT.as_secs()
            ))),
        }
    }

    /// All objects of a kind that match, page by page. One that this version cannot read is named
    /// and left out, so that the others are none the worse. Also as they were sent.
    pub(crate) async fn list<K>(
        &self,
        asked: &str,
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
        let mut found = Vec::new();
        let mut page = params.clone().limit(PAGE);
        loop {
            let list = self.ask(asked, api.list(&page)).await?;
            for object in list.items {
                let name = object.metadata.name.clone().unwrap_or_default();
                let mut value = serde_json::to_value(object)
                    .map_err(|error| Failure::System(error.to_string()))?;
                // A list says of what once for all.
                value["apiVersion"] = K::api_version(&()).into();
                value["kind"] = K::kind(&()).into();
                match serde_json::from_value(value.clone()) {
                    Ok(object) => found.push((object, value)),
                    Err(error) => print::err(format!("stoker: left out {name}: {error}")),
                }
            }
            match list.metadata.continue_.filter(|it| !it.is_empty()) {
                Some(token) => page.continue_token = Some(token),
                None => return Ok(found),
            }
        }
    }

    /// What went wrong when the cluster was asked about `asked`.
    pub(crate) fn failure(&self, asked: &str, error: kube::Error) -> Failure {
        match error {
            kube::Error::Api(status) => self.refusal(asked, &status),
            kube::Error::SerdeError(error) => Failure::System(format!(
                "{asked} is not as this version of stoker knows it: {error}; `stoker version` \
                 shows both versions"
            )),
            kube::Error::Service(error) => self.unreachable(&chain(error.as_ref())),
            error => self.unreachable(&chain(&error)),
        }
    }

    fn unreachable(&self, why: &str) -> Failure {
        Failure::System(format!("cannot reach the cluster at {}: {why}", self.server))
    }

    fn refusal(&self, asked: &str, status: &Status) -> Failure {
        let details = status.details.as_ref();
        let is_named = details.is_some_and(|it| !it.name.is_empty());
        let message = status.message.trim();
        // Of a kind that it does not know the server says so in plain text, without a reason.
        let is_missing = status.code == 404;
        if is_missing && details.is_some_and(|it| it.kind == "namespaces") {
            let namespace = &self.namespace;
            return Failure::Input(format!(
                "no namespace `{namespace}` in the cluster at {}; make it with `kubectl create \
                 namespace {namespace}` or name another by --namespace",
                self.server
            ));
        }
        if is_missing && is_named {
            return Failure::Input(format!(
                "no {asked} in namespace `{}` of the cluster at {}; for what `stoker run` left on \
                 this machine, add --root",
                self.namespace, self.server
            ));
        }
        if is_missing {
            return Failure::System(format!(
                "Stoker is not installed in the cluster at {}: it does not know {API_VERSION}; \
                 install it with `helm install stoker charts/stoker --namespace stoker \
                 --create-namespace`",
                self.server
            ));
        }
        if status.is_forbidden() {
            return Failure::System(format!("the cluster at {} refuses: {message}", self.server));
        }
        if status.code == 401 {
            return Failure::System(format!(
                "the cluster at {} does not know who you are: its answer is {message}; check the \
                 user of the kubeconfig's context",
                self.server
            ));
        }
        if status.is_invalid() {
            return Failure::Input(format!("the cluster refuses {asked}: {}", causes(status)));
        }
        Failure::System(format!(
            "the cluster at {} answers {} about {asked}: {message}",
            self.server, status.code
        ))
    }
}

/// Why an object was refused, field by field.
fn causes(status: &Status) -> String {
    let causes = status.details.iter().flat_map(|it| &it.causes);
    let lines: Vec<String> = causes
        .map(|it| {
            // A rule's message comes after the whole value, which says nothing to people.
            let rule = it.message.rsplit_once("\": ").map_or(it.message.as_str(), |(_, rule)| rule);
            match it.field.as_str() {
                "" | "<nil>" => rule.to_owned(),
                field => format!("{field}: {}", rule.trim_start_matches("Invalid value: ")),
            }
        })
        .collect();
    if lines.is_empty() { status.message.clone() } else { lines.join("; ") }
}

/// An error with all that caused it.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let more = error.to_string();
        // Many errors repeat what they wrap.
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
            "the kubeconfig has no current context: name one by --context, or choose it with \
             `kubectl config use-context NAME`"
                .to_owned(),
        ),
        KubeconfigError::LoadContext(name) => Failure::Input(format!(
            "the kubeconfig has no context `{name}`; `kubectl config get-contexts` lists them"
        )),
        other => Failure::Input(format!("the kubeconfig cannot be used: {}", chain(&other))),
    })
}

fn in_cluster(options: &Options) -> Result<Config, Failure> {
    if environment("KUBERNETES_SERVICE_HOST").is_none() {
        return Err(Failure::Input(
            "no cluster: there is no kubeconfig; name one by --kubeconfig or KUBECONFIG, or put it \
             at ~/.kube/config"
                .to_owned(),
        ));
    }
    if let Some(context) = &options.context {
        return Err(Failure::Input(format!(
            "--context {context}: there is no kubeconfig, and a pod's service account has no \
             contexts"
        )));
    }
    Config::incluster().map_err(|error| {
        Failure::System(format!("the pod's service account cannot be used: {}", chain(&error)))
    })
}

/// The kubeconfig that the flag names, else those of `KUBECONFIG`, else the one at home.
fn kubeconfig(options: &Options) -> Result<Option<Kubeconfig>, Failure> {
    let read = |path: &PathBuf| {
        Kubeconfig::read_from(path).map_err(|error| {
            Failure::Input(format!("the kubeconfig {}: {}", path.display(), chain(&error)))
        })
    };
    if let Some(path) = &options.kubeconfig {
        return read(path).map(Some);
    }
    let Some(list) = environment("KUBECONFIG") else {
        return home_kubeconfig().as_ref().map(read).transpose();
    };
    // As with kubectl, files of the list that are not there are none the worse.
    let paths: Vec<PathBuf> = std::env::split_paths(&list).filter(|it| it.is_file()).collect();
    let mut merged: Option<Kubeconfig> = None;
    for path in &paths {
        let next = read(path)?;
        merged = Some(match merged {
            None => next,
            Some(first) => first.merge(next).map_err(|error| {
                Failure::Input(format!("the kubeconfig {}: {}", path.display(), chain(&error)))
            })?,
        });
    }
    if merged.is_none() {
        let list = list.to_string_lossy();
        return Err(Failure::Input(format!("KUBECONFIG is {list}: no such file")));
    }
    Ok(merged)
}

fn home_kubeconfig() -> Option<PathBuf> {
    let path = PathBuf::from(environment("HOME")?).join(".kube/config");
    path.is_file().then_some(path)
}

fn environment(name: &str) -> Option<std::ffi::OsString> {
    std::env::var_os(name).filter(|it| !it.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(value: Value) -> Failure {
        // No request is sent: the service is never called.
        let service = tower_never();
        let cluster = Cluster {
            client: service,
            namespace: "ml".to_owned(),
            server: "https://here:6443".to_owned(),
        };
        let status: Status = serde_json::from_value(value).unwrap();
        cluster.failure("experiment `mnist`", kube::Error::Api(Box::new(status)))
    }

    fn tower_never() -> Client {
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
    fn a_rule_that_refuses_is_told_without_the_value() {
        let status = |message: &str| -> Status {
            let cause = serde_json::json!({"field": "spec", "message": message});
            serde_json::from_value(serde_json::json!({"details": {"causes": [cause]}})).unwrap()
        };
        assert_eq!(causes(&status("Invalid value: it stays killed")), "spec: it stays killed");
        assert_eq!(causes(&status("Invalid value: \"object\": no")), "spec: no");
        assert_eq!(causes(&status("Required value")), "spec: Required value");
    }

    #[test]
    fn answers_of_the_api_server_are_told_with_a_remedy() {
        check(
            serde_json::json!({"code": 404, "reason": "NotFound", "message": "no",
                "details": {"name": "mnist", "kind": "experiments"}}),
            2,
            "no experiment `mnist` in namespace `ml` of the cluster at https://here:6443",
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
            "refuses: User x cannot",
        );
        check(serde_json::json!({"code": 401, "message": "Unauthorized"}), 1, "who you are");
        check(
            serde_json::json!({"code": 422, "reason": "Invalid", "message": "all of it",
            "details": {"name": "mnist", "causes": [
                {"field": "spec", "message": "Invalid value: \"object\": it stays killed"},
            ]}}),
            2,
            "refuses experiment `mnist`: spec: it stays killed",
        );
        check(serde_json::json!({"code": 500, "message": "oh"}), 1, "answers 500 about");
    }
}
