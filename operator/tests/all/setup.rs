//! A shared control plane, operator processes, and access to the objects that they create.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use kube::{Api, Client, Config, ResourceExt as _};
use serde_json::{Value, json};
use stoker_api::experiment::{Experiment, Phase};
use stoker_api::trial::{ClosedFact, Fact, ReopenedFact, ResultFact, Trial, TrialStatus};
use stoker_test_cluster::{ControlPlane, Options};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tokio::task::block_in_place;

use crate::operator_process::{Operator, get};

/// Control plane that all tests of this process share.
pub(crate) fn plane() -> &'static ControlPlane {
    static PLANE: OnceLock<ControlPlane> = OnceLock::new();
    PLANE.get_or_init(|| {
        let options = Options { controllers: true, ..Default::default() };
        let plane = ControlPlane::start_with(options).unwrap_or_else(|error| panic!("{error}"));
        plane.apply_crds(&crds()).unwrap();
        plane
    })
}

/// Path in a CRD to the schemas of `spec` and `status`.
pub(crate) const SCHEMA: &str = "/spec/versions/0/schema/openAPIV3Schema/properties";

/// Starts a control plane for one test. `change` edits each CRD before it is applied.
pub(crate) fn own_plane(options: Options, change: impl Fn(&mut Value)) -> &'static ControlPlane {
    let plane = ControlPlane::start_with(options).unwrap_or_else(|error| panic!("{error}"));
    let folder = tempfile::tempdir().unwrap();
    for definition in stoker_api::crd::all() {
        let mut definition = serde_json::to_value(definition).unwrap();
        change(&mut definition);
        let name = definition["metadata"]["name"].as_str().unwrap();
        std::fs::write(folder.path().join(format!("{name}.yaml")), definition.to_string()).unwrap();
    }
    plane.apply_crds(folder.path()).unwrap();
    Box::leak(Box::new(plane))
}

/// Directory of the CRD manifests.
pub(crate) fn crds() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../crds")
}

/// Creates a client from a kubeconfig file.
pub(crate) async fn client_of(kubeconfig: &Path) -> Client {
    let text = std::fs::read_to_string(kubeconfig).unwrap();
    let kubeconfig = kube::config::Kubeconfig::from_yaml(&text).unwrap();
    let options = Default::default();
    let mut config = Config::from_custom_kubeconfig(kubeconfig, &options).await.unwrap();
    config.default_retry = false;
    Client::try_from(config).unwrap()
}

/// Mark of denied requests in the audit log.
const DENIED_MARK: &str = "\"authorization.k8s.io/decision\":\"forbid\"";

/// Lease duration in seconds.
pub(crate) const LEASE_SECONDS: u64 = 8;

/// Service account of the operator, as the chart names it.
pub(crate) const ACCOUNT: &str = "stoker-operator";

/// Renders the chart's service account and RBAC rules for a release in `namespace` that watches
/// these namespaces, which are separated by commas.
pub(crate) fn rbac_rules(plane: &ControlPlane, namespace: &str, watched: &str) -> String {
    let chart = Path::new(env!("CARGO_MANIFEST_DIR")).join("../charts/stoker");
    let chart = chart.display().to_string();
    let watched = format!("watchNamespaces={{{watched}}}");
    let release = ["template", "stoker", &chart, "--namespace", namespace, "--set", &watched];
    plane.helm(&[&release[..], &["--show-only", "templates/rbac.yaml"]].concat()).unwrap()
}

pub(crate) fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap()
}

/// Namespace of one test, with everything that its operators need.
pub(crate) struct TestNamespace {
    pub(crate) plane: &'static ControlPlane,
    pub(crate) namespace: String,
    pub(crate) folder: TempDir,
    pub(crate) client: Client,
    /// Kubeconfig of the operator's service account, which has the chart's RBAC rules.
    pub(crate) kubeconfig: PathBuf,
    /// Whether the test fails if RBAC denied a request.
    pub(crate) checks_rules: bool,
    /// Ports of the operators' metrics endpoints.
    metrics_ports: Mutex<BTreeSet<u16>>,
}

impl TestNamespace {
    pub(crate) async fn new(namespace: &str) -> Self {
        Self::on(plane(), namespace).await
    }

    /// Same as [`new`](Self::new), on this control plane.
    pub(crate) async fn on(plane: &'static ControlPlane, namespace: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let kubeconfig = block_in_place(|| {
            plane.make_namespace(namespace).unwrap();
            plane.apply(&rbac_rules(plane, namespace, namespace)).unwrap();
            certificate(folder.path());
            plane.kubeconfig_for(namespace, ACCOUNT).unwrap()
        });
        std::fs::write(folder.path().join("gang"), [7; 32]).unwrap();
        let namespace = namespace.to_owned();
        let client = client_of(plane.kubeconfig()).await;
        let metrics_ports = Mutex::default();
        Self { plane, namespace, folder, client, kubeconfig, checks_rules: true, metrics_ports }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Starts an operator that listens on `port` and the next port.
    pub(crate) fn operator(&self, identity: &str, port: u16) -> Operator {
        self.operator_with(identity, port, &[])
    }

    pub(crate) fn operator_with(&self, identity: &str, port: u16, more: &[&str]) -> Operator {
        self.operator_by(identity, port, &self.kubeconfig, more)
    }

    /// Starts an operator with this kubeconfig.
    pub(crate) fn operator_by(
        &self,
        identity: &str,
        port: u16,
        kubeconfig: &Path,
        more: &[&str],
    ) -> Operator {
        let program = Command::new(env!("CARGO_BIN_EXE_stoker-operator"));
        self.operator_as(program, identity, port, kubeconfig, more)
    }

    /// Starts an operator whose resolver knows these lines of /etc/hosts. Requires root.
    pub(crate) fn operator_with_hosts(&self, identity: &str, port: u16, hosts: &str) -> Operator {
        let file = self.path("hosts");
        std::fs::write(&file, hosts).unwrap();
        let mut program = Command::new("unshare");
        let script = r#"mount --bind "$0" /etc/hosts && exec "$@""#;
        program.args(["--mount", "sh", "-c", script]).arg(file);
        program.arg(env!("CARGO_BIN_EXE_stoker-operator"));
        self.operator_as(program, identity, port, &self.kubeconfig, &[])
    }

    fn operator_as(
        &self,
        mut program: Command,
        identity: &str,
        port: u16,
        kubeconfig: &Path,
        more: &[&str],
    ) -> Operator {
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(self.path(&format!("{identity}.log")))
            .unwrap();
        self.metrics_ports.lock().unwrap().insert(port + 1);
        let child = program
            .arg("run")
            .args(["--identity", identity, "--namespace", &self.namespace])
            .args(["--watch-namespaces", &self.namespace])
            .args(["--lease-seconds", &LEASE_SECONDS.to_string()])
            .args(["--door-listen", &format!("127.0.0.1:{port}")])
            .env("STOKER_DOOR_URL", format!("https://127.0.0.1:{port}"))
            .args(["--observe-listen", &format!("127.0.0.1:{}", port + 1)])
            .args(["--trainer-image", "trainer:1"])
            .env("STOKER_STORAGE_URL", "memory:///")
            .args(["--log-format", "text"])
            .arg("--tls-cert")
            .arg(self.path("tls.crt"))
            .arg("--tls-key")
            .arg(self.path("tls.key"))
            .arg("--tls-ca")
            .arg(self.path("ca.crt"))
            .arg("--gang-key-file")
            .arg(self.path("gang"))
            .args(more)
            .env("KUBECONFIG", kubeconfig)
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        Operator { child, port }
    }

    pub(crate) fn experiments(&self) -> Api<Experiment> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    pub(crate) fn trials(&self) -> Api<Trial> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Creates an experiment with this spec.
    pub(crate) fn apply(&self, name: &str, spec: Value) {
        self.try_apply(name, spec).unwrap();
    }

    pub(crate) fn try_apply(&self, name: &str, spec: Value) -> Result<String, String> {
        let object = json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "Experiment",
            "metadata": { "name": name, "namespace": self.namespace }, "spec": spec,
        });
        let applied = block_in_place(|| self.plane.apply(&object.to_string()));
        applied.map_err(|error| error.to_string())
    }

    pub(crate) fn patch(&self, name: &str, patch: &Value) -> Result<String, String> {
        let patch = patch.to_string();
        let arguments =
            ["patch", "experiment", name, "-n", &self.namespace, "--type=merge", "-p", &patch];
        self.plane.kubectl(&arguments).map_err(|error| error.to_string())
    }

    pub(crate) async fn experiment(&self, name: &str) -> Experiment {
        self.experiments().get(name).await.unwrap()
    }

    /// Waits until an experiment is in one of these phases, and returns it.
    pub(crate) async fn wait_for(&self, name: &str, phases: &[Phase]) -> Experiment {
        let end = std::time::Instant::now() + stoker_test_cluster::PATIENCE;
        loop {
            let experiment = self.experiments().get(name).await;
            if let Ok(experiment) = &experiment
                && experiment.status.as_ref().is_some_and(|status| phases.contains(&status.phase))
            {
                return experiment.clone();
            }
            assert!(
                std::time::Instant::now() < end,
                "{name} is not {phases:?}: {:#?}\n{}",
                experiment.map(|experiment| experiment.status),
                self.logs()
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Returns the trials of an experiment, sorted by index.
    pub(crate) async fn trials_of(&self, name: &str) -> Vec<Trial> {
        let mut all = self.trials().list(&Default::default()).await.unwrap().items;
        all.retain(|trial| trial.spec.experiment == name);
        all.sort_by_key(|trial| trial.spec.index);
        all
    }

    /// Waits until an experiment has `num` trials and `is_expected` returns `true` for each status.
    pub(crate) async fn wait_for_trials(
        &self,
        name: &str,
        num: usize,
        is_expected: impl Fn(&TrialStatus) -> bool,
    ) -> Vec<Trial> {
        let end = std::time::Instant::now() + stoker_test_cluster::PATIENCE;
        loop {
            let trials = self.trials_of(name).await;
            let are_expected =
                trials.iter().all(|trial| trial.status.as_ref().is_some_and(&is_expected));
            if trials.len() == num && are_expected {
                return trials;
            }
            let is_late = std::time::Instant::now() > end;
            let statuses = trials.into_iter().map(|trial| trial.status);
            assert!(!is_late, "{name}: {:#?}\n{}", statuses.collect::<Vec<_>>(), self.logs());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    pub(crate) fn logs(&self) -> String {
        let mut text = String::new();
        // The gauges show whether an operator leads, what it has cached, and what is queued.
        for port in self.metrics_ports.lock().unwrap().iter() {
            let gauges = ["stoker_leader ", "stoker_cached_objects{", "stoker_queued{"];
            let is_wanted = |line: &&str| gauges.iter().any(|gauge| line.starts_with(gauge));
            let values = match get(&format!("127.0.0.1:{port}"), "/metrics") {
                Ok(metrics) => metrics.lines().filter(is_wanted).collect::<Vec<_>>().join("\n"),
                Err(error) => format!("no response: {error}"),
            };
            text += &format!("--- metrics of port {port}\n{values}\n");
        }
        for path in self.log_files() {
            let log = std::fs::read_to_string(&path).unwrap();
            let last = log.lines().rev().take(30).collect::<Vec<_>>();
            let last = last.into_iter().rev().collect::<Vec<_>>().join("\n");
            text += &format!("--- {}\n{last}\n", path.display());
        }
        text
    }

    fn log_files(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.folder.path()).unwrap();
        let paths = entries.map(|entry| entry.unwrap().path());
        paths.filter(|path| path.extension().is_some_and(|extension| extension == "log")).collect()
    }
}

impl Drop for TestNamespace {
    /// Checks that no operator panicked, and that the chart's RBAC rules allowed every request. An
    /// operator repeats a reconcile that panicked, so that a test can pass nevertheless.
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        for log in self.log_files() {
            let text = std::fs::read_to_string(&log).unwrap();
            let lines: Vec<&str> = text.lines().collect();
            let panic = lines.iter().position(|line| line.contains("panicked at"));
            let panic = panic.map(|first| lines[first..].iter().take(5).collect::<Vec<_>>());
            assert_eq!(panic, None, "{}", log.display());
        }
        if !self.checks_rules {
            return;
        }
        let user = format!("\"system:serviceaccount:{}:{ACCOUNT}\"", self.namespace);
        let log = std::fs::read_to_string(self.plane.audit_log()).unwrap();
        let is_refused = |line: &&str| line.contains(DENIED_MARK) && line.contains(&user);
        let refused: Vec<&str> = log.lines().filter(is_refused).collect();
        assert!(refused.is_empty(), "denied by the chart's RBAC rules: {refused:#?}");
    }
}

/// Decisions of all searches, without times. They must not depend on how often the operator was
/// killed.
pub(crate) fn decisions_of(trials: &[Trial]) -> Vec<Value> {
    let of = |trial: &Trial| {
        let status = trial.status.clone().unwrap_or_default();
        let facts = status.facts.into_iter().map(|fact| match fact {
            Fact::Result(result) => Fact::Result(ResultFact { at: None, ..result }),
            Fact::Closed(closed) => Fact::Closed(ClosedFact { at: None, ..closed }),
            Fact::Reopened(reopened) => Fact::Reopened(ReopenedFact { at: None, ..reopened }),
        });
        json!({
            "name": trial.name_any(),
            "seed": trial.spec.seed,
            "hyperparameters": trial.spec.hyperparameters,
            "facts": facts.collect::<Vec<_>>(),
            "phase": status.phase,
            "restarts": status.restarts,
        })
    };
    trials.iter().map(of).collect()
}

/// Returns a free port for the report server of an operator. The next port is free for its metrics.
pub(crate) fn operator_port() -> u16 {
    let ports = stoker_test_cluster::free_ports();
    let [report_port, _metrics_port] = ports.unwrap_or_else(|error| panic!("{error}"));
    report_port
}

/// Creates a CA and, signed by it, the report server's certificate.
fn certificate(folder: &Path) {
    let openssl = |arguments: &[&str]| {
        let mut command = Command::new("openssl");
        command.args(arguments).current_dir(folder).stderr(Stdio::null());
        assert!(command.status().unwrap().success(), "openssl {arguments:?}");
    };
    let key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];
    let ca = ["-x509", "-days", "2", "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.crt"];
    openssl(&[&["req"], &key[..], &ca].concat());
    let request = ["-subj", "/CN=door", "-keyout", "tls.key", "-out", "door.csr"];
    openssl(&[&["req"], &key[..], &request].concat());
    std::fs::write(folder.join("names"), "subjectAltName=IP:127.0.0.1").unwrap();
    let by = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2"];
    let of = ["x509", "-req", "-in", "door.csr", "-out", "tls.crt", "-extfile", "names"];
    openssl(&[&of[..], &by[..]].concat());
}

pub(crate) fn merge(base: &mut Value, over: &Value) {
    match (base, over) {
        (Value::Object(base), Value::Object(over)) => {
            for (name, value) in over {
                merge(base.entry(name.clone()).or_insert(Value::Null), value);
            }
        }
        (base, over) => base.clone_from(over),
    }
}
