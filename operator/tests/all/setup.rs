//! A control plane for all tests, operators as processes, and looks at what they made.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use kube::{Api, Client, Config, ResourceExt as _};
use serde_json::{Value, json};
use stoker_api::experiment::{Experiment, Phase};
use stoker_api::trial::{Trial, TrialStatus};
use stoker_test_cluster::{ControlPlane, wait_until};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tokio::task::block_in_place;

/// The control plane that all tests of this process share.
pub(crate) fn plane() -> &'static ControlPlane {
    static PLANE: OnceLock<ControlPlane> = OnceLock::new();
    PLANE.get_or_init(|| {
        let options = stoker_test_cluster::Options { controllers: true, ..Default::default() };
        let plane = ControlPlane::start_with(options).unwrap_or_else(|it| panic!("{it}"));
        plane.apply_crds(&crds()).unwrap();
        plane
    })
}

/// Where the definitions of our objects are.
pub(crate) fn crds() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../crds")
}

/// A client by a kubeconfig.
pub(crate) async fn client_of(kubeconfig: &Path) -> Client {
    let text = std::fs::read_to_string(kubeconfig).unwrap();
    let kubeconfig = kube::config::Kubeconfig::from_yaml(&text).unwrap();
    let options = Default::default();
    let mut config = Config::from_custom_kubeconfig(kubeconfig, &options).await.unwrap();
    config.default_retry = false;
    Client::try_from(config).unwrap()
}

/// How the audit log says that rules do not allow a request.
const FORBIDDEN: &str = "\"authorization.k8s.io/decision\":\"forbid\"";

/// How long a leader leads without renewing.
pub(crate) const LEASE_SECONDS: u64 = 4;

/// The operator's service account, as the chart names it.
pub(crate) const ACCOUNT: &str = "stoker-operator";

/// The chart's service account and rules, of a release in `namespace` that watches it alone.
pub(crate) fn rules(plane: &ControlPlane, namespace: &str) -> String {
    let chart = Path::new(env!("CARGO_MANIFEST_DIR")).join("../charts/stoker");
    let chart = chart.display().to_string();
    let watched = format!("watchNamespaces={{{namespace}}}");
    let release = ["template", "stoker", &chart, "--namespace", namespace, "--set", &watched];
    plane.helm(&[&release[..], &["--show-only", "templates/rbac.yaml"]].concat()).unwrap()
}

pub(crate) fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap()
}

/// A namespace of one test, with what its operators need.
pub(crate) struct Place {
    pub(crate) plane: &'static ControlPlane,
    pub(crate) namespace: String,
    pub(crate) folder: TempDir,
    pub(crate) client: Client,
    /// As the operator: its rules are the chart's.
    pub(crate) kubeconfig: PathBuf,
    /// Whether the test fails if those do not allow a request.
    pub(crate) checks_rules: bool,
    /// Where its operators tell what they count.
    observed: Mutex<BTreeSet<u16>>,
}

impl Place {
    pub(crate) async fn new(namespace: &str) -> Self {
        Self::on(plane(), namespace).await
    }

    /// One on a control plane of its own.
    pub(crate) async fn on(plane: &'static ControlPlane, namespace: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let kubeconfig = block_in_place(|| {
            plane.make_namespace(namespace).unwrap();
            plane.apply(&rules(plane, namespace)).unwrap();
            certificate(folder.path());
            plane.kubeconfig_for(namespace, ACCOUNT).unwrap()
        });
        std::fs::write(folder.path().join("gang"), [7; 32]).unwrap();
        let namespace = namespace.to_owned();
        let client = client_of(plane.kubeconfig()).await;
        let observed = Mutex::default();
        Self { plane, namespace, folder, client, kubeconfig, checks_rules: true, observed }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// An operator that listens on `port` and the one after it.
    pub(crate) fn operator(&self, identity: &str, port: u16) -> Operator {
        self.operator_with(identity, port, &[])
    }

    pub(crate) fn operator_with(&self, identity: &str, port: u16, more: &[&str]) -> Operator {
        self.operator_by(identity, port, &self.kubeconfig, more)
    }

    /// An operator that reaches the API server as `kubeconfig` says.
    pub(crate) fn operator_by(
        &self,
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
        self.observed.lock().unwrap().insert(port + 1);
        let child = Command::new(env!("CARGO_BIN_EXE_stoker-operator"))
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

    /// Creates an experiment with a grid over `x`: 0 to `points` - 1 by thirds, of so many pods each.
    pub(crate) fn apply(&self, name: &str, spec: Value) {
        let object = json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "Experiment",
            "metadata": { "name": name, "namespace": self.namespace }, "spec": spec,
        });
        block_in_place(|| self.plane.apply(&object.to_string())).unwrap();
    }

    pub(crate) fn patch(&self, name: &str, patch: &Value) -> Result<String, String> {
        let patch = patch.to_string();
        let arguments =
            ["patch", "experiment", name, "-n", &self.namespace, "--type=merge", "-p", &patch];
        self.plane.kubectl(&arguments).map_err(|it| it.to_string())
    }

    pub(crate) async fn experiment(&self, name: &str) -> Experiment {
        self.experiments().get(name).await.unwrap()
    }

    /// Waits until an experiment's phase is one of these, and gives it.
    pub(crate) async fn wait_for(&self, name: &str, phases: &[Phase], seconds: u64) -> Experiment {
        let end = std::time::Instant::now() + Duration::from_secs(seconds);
        loop {
            let found = self.experiments().get(name).await;
            if let Ok(found) = &found
                && found.status.as_ref().is_some_and(|it| phases.contains(&it.phase))
            {
                return found.clone();
            }
            assert!(
                std::time::Instant::now() < end,
                "{name} is not {phases:?} after {seconds} s: {:#?}\n{}",
                found.map(|it| it.status),
                self.logs()
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// The trials of an experiment, by index.
    pub(crate) async fn trials_of(&self, name: &str) -> Vec<Trial> {
        let mut all = self.trials().list(&Default::default()).await.unwrap().items;
        all.retain(|it| it.spec.experiment == name);
        all.sort_by_key(|it| it.spec.index);
        all
    }

    /// Waits for at most half a minute until an experiment has `num` trials and `is_so` of each one's status.
    pub(crate) async fn wait_for_trials(
        &self,
        name: &str,
        num: usize,
        is_so: impl Fn(&TrialStatus) -> bool,
    ) -> Vec<Trial> {
        let end = std::time::Instant::now() + Duration::from_secs(30);
        loop {
            let trials = self.trials_of(name).await;
            let are_so = trials.iter().all(|trial| trial.status.as_ref().is_some_and(&is_so));
            if trials.len() == num && are_so {
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
        // A silent operator tells by its gauges whether it leads, and what it knows and has to do.
        for port in self.observed.lock().unwrap().iter() {
            let gauges = ["stoker_leader ", "stoker_cached_objects{", "stoker_queued{"];
            let is_wanted = |it: &&str| gauges.iter().any(|gauge| it.starts_with(gauge));
            let told = match get(&format!("127.0.0.1:{port}"), "/metrics") {
                Ok(metrics) => metrics.lines().filter(is_wanted).collect::<Vec<_>>().join("\n"),
                Err(error) => format!("no answer: {error}"),
            };
            text += &format!("--- metrics of port {port}\n{told}\n");
        }
        for entry in std::fs::read_dir(self.folder.path()).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|it| it == "log") {
                let log = std::fs::read_to_string(&path).unwrap();
                let last = log.lines().rev().take(30).collect::<Vec<_>>();
                let last = last.into_iter().rev().collect::<Vec<_>>().join("\n");
                text += &format!("--- {}\n{last}\n", path.display());
            }
        }
        text
    }
}

impl Drop for Place {
    /// Whatever the test was about, the chart's rules allowed all that its operators asked for.
    fn drop(&mut self) {
        if std::thread::panicking() || !self.checks_rules {
            return;
        }
        let user = format!("\"system:serviceaccount:{}:{ACCOUNT}\"", self.namespace);
        let log = std::fs::read_to_string(self.plane.audit_log()).unwrap();
        let is_refused = |it: &&str| it.contains(FORBIDDEN) && it.contains(&user);
        let refused: Vec<&str> = log.lines().filter(is_refused).collect();
        assert!(refused.is_empty(), "not allowed by the chart's rules: {refused:#?}");
    }
}

/// What all searches decided: what must be the same however often the operator was killed.
pub(crate) fn decided(trials: &[Trial]) -> Vec<Value> {
    let of = |trial: &Trial| {
        let status = trial.status.clone().unwrap_or_default();
        json!({
            "name": trial.name_any(),
            "seed": trial.spec.seed,
            "hyperparameters": trial.spec.hyperparameters,
            "facts": status.facts,
            "phase": status.phase,
            "restarts": status.restarts,
        })
    };
    trials.iter().map(of).collect()
}

const READY: &str = "HTTP/1.1 200";

/// An operator's process; killed when dropped.
pub(crate) struct Operator {
    child: Child,
    pub(crate) port: u16,
}

impl Operator {
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until it knows what the API server holds.
    pub(crate) fn wait_ready(&mut self, place: &Place) {
        // Others of this runtime may carry what it asks for.
        let ready = block_in_place(|| {
            wait_until("the operator is ready", 30, || match self.readiness() {
                Ok(text) if text.starts_with(READY) => Ok(()),
                other => Err(format!("{other:?}")),
            })
        });
        if let Err(error) = ready {
            panic!("{error}: {:?}\n{}", self.child.try_wait(), place.logs());
        }
    }

    fn readiness(&self) -> std::io::Result<String> {
        get(&format!("127.0.0.1:{}", self.port + 1), "/readyz")
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.readiness().is_ok_and(|it| it.starts_with(READY))
    }

    pub(crate) fn signal(&self, signal: &str) {
        let pid = self.pid().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    }

    /// Ends it as a power cut would.
    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn is_alive(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// What it counts.
    pub(crate) fn metrics(&self) -> String {
        get(&format!("127.0.0.1:{}", self.port + 1), "/metrics").unwrap()
    }
}

impl Drop for Operator {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A GET without a client library.
pub(crate) fn get(address: &str, path: &str) -> std::io::Result<String> {
    use std::io::{Read as _, Write as _};
    let mut stream = std::net::TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

/// Two ports of this machine that nobody listens on now.
pub(crate) fn free_ports() -> u16 {
    let [door, _observe] = stoker_test_cluster::free_ports().unwrap_or_else(|it| panic!("{it}"));
    door
}

/// An authority, and the door's certificate by it.
fn certificate(folder: &Path) {
    let openssl = |arguments: &[&str]| {
        let mut command = Command::new("openssl");
        command.args(arguments).current_dir(folder).stderr(Stdio::null());
        assert!(command.status().unwrap().success(), "openssl {arguments:?}");
    };
    let key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];
    let ca = ["-x509", "-days", "2", "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.crt"];
    openssl(&[&["req"], &key[..], &ca].concat());
    let door = ["-subj", "/CN=door", "-keyout", "tls.key", "-out", "door.csr"];
    openssl(&[&["req"], &key[..], &door].concat());
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
