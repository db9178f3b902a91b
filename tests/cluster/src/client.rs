//! Access to a cluster from a test: kubectl, helm, and polling.

use std::io::{BufReader, Read as _, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::error::{Error, WithPath, stdout_of};
use crate::programs;

/// Time after which a test that waits for an event fails. Tests run beside others on busy machines,
/// so it is far longer than any event takes. It is shorter than the interval at which the operator
/// visits all objects again, 402 s, which would hide a missed event.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// Poll interval.
const PERIOD: Duration = Duration::from_millis(100);

/// Polls until `probe` returns a value. Its last error becomes part of the timeout error.
///
/// # Errors
///
/// [`Error::Timeout`] if it takes longer than [`PATIENCE`].
pub fn wait_until<T>(what: &str, probe: impl FnMut() -> Result<T, String>) -> Result<T, Error> {
    wait_within(PATIENCE, what, probe)
}

/// Same as [`wait_until`], with another limit.
///
/// # Errors
///
/// [`Error::Timeout`].
pub fn wait_within<T>(
    limit: Duration,
    what: &str,
    mut probe: impl FnMut() -> Result<T, String>,
) -> Result<T, Error> {
    let deadline = Instant::now() + limit;
    loop {
        match probe() {
            Ok(value) => return Ok(value),
            Err(seen) if Instant::now() >= deadline => {
                return Err(Error::Timeout { what: what.to_string(), seen });
            }
            Err(_) => std::thread::sleep(PERIOD),
        }
    }
}

/// A kubeconfig and the programs that use it.
#[derive(Clone, Debug)]
pub struct Client {
    kubeconfig: PathBuf,
    kubectl: PathBuf,
    /// Directory for the caches of kubectl and helm, separate for each cluster.
    cache_folder: PathBuf,
}

impl Client {
    pub(crate) fn new(kubeconfig: PathBuf, cache_folder: PathBuf) -> Result<Self, Error> {
        Ok(Self { kubeconfig, kubectl: programs::control_plane("kubectl")?, cache_folder })
    }

    /// Kubeconfig of kubectl and helm.
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// Returns a kubectl command that is not started yet, for processes that run beside the test,
    /// such as `logs --follow`.
    pub fn kubectl_command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.kubectl);
        command.env("KUBECONFIG", &self.kubeconfig).stdin(Stdio::null());
        command.arg(format!("--cache-dir={}", self.cache_folder.join("kubectl").display()));
        command.args(arguments);
        command
    }

    /// Runs kubectl and returns its standard output.
    ///
    /// # Errors
    ///
    /// [`Error::Failed`], with both outputs, if it exits with a nonzero code.
    pub fn kubectl(&self, arguments: &[&str]) -> Result<String, Error> {
        finish(self.kubectl_command(arguments), "")
    }

    /// Same as [`Client::kubectl`], with `input` as its standard input.
    ///
    /// # Errors
    ///
    /// Same as [`Client::kubectl`].
    pub fn kubectl_with_input(&self, arguments: &[&str], input: &str) -> Result<String, Error> {
        finish(self.kubectl_command(arguments), input)
    }

    /// Returns the output of `kubectl get` for an object or a list, as JSON.
    ///
    /// # Errors
    ///
    /// Same as [`Client::kubectl`].
    pub fn get(&self, arguments: &[&str]) -> Result<Value, Error> {
        let text = self.kubectl(&[&["get", "-o", "json"], arguments].concat())?;
        serde_json::from_str(&text).map_err(std::io::Error::other).with_path(&self.kubectl)
    }

    /// Watches an object until `probe` returns a value for one of its states. `arguments` name the
    /// object as for `kubectl get`. It costs less than polling, because kubectl needs about 100 ms
    /// of CPU time to start.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`] after [`PATIENCE`], with the last error of `probe` or kubectl.
    pub fn watch_until<T>(
        &self,
        what: &str,
        arguments: &[&str],
        probe: impl FnMut(&Value) -> Result<T, String>,
    ) -> Result<T, Error> {
        self.watch_within(PATIENCE, what, arguments, probe)
    }

    /// Same as [`Client::watch_until`], with another limit.
    ///
    /// # Errors
    ///
    /// Same as [`Client::watch_until`].
    pub fn watch_within<T>(
        &self,
        limit: Duration,
        what: &str,
        arguments: &[&str],
        mut probe: impl FnMut(&Value) -> Result<T, String>,
    ) -> Result<T, Error> {
        let deadline = Instant::now() + limit;
        // A watch ends if the API server stops or the object does not exist yet.
        wait_within(limit, what, || {
            let seconds = deadline.saturating_duration_since(Instant::now()).as_secs() + 1;
            let timeout = format!("--request-timeout={seconds}s");
            let watch = ["get", "--watch", "-o", "json", &timeout];
            self.watch(&[&watch[..], arguments].concat(), &mut probe)
        })
    }

    /// Runs kubectl until `probe` returns a value for an object that it prints.
    fn watch<T>(
        &self,
        arguments: &[&str],
        mut probe: impl FnMut(&Value) -> Result<T, String>,
    ) -> Result<T, String> {
        let mut command = self.kubectl_command(arguments);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = Killed(command.spawn().map_err(|error| error.to_string())?);
        let stdout = child.0.stdout.take().ok_or("standard output is not piped")?;
        let objects = serde_json::Deserializer::from_reader(BufReader::new(stdout));
        let mut seen = None;
        for object in objects.into_iter::<Value>() {
            match object.map_err(|error| error.to_string()).and_then(|object| probe(&object)) {
                Ok(value) => return Ok(value),
                Err(error) => seen = Some(error),
            }
        }
        let mut stderr = String::new();
        let _ = child.0.stderr.take().map(|mut pipe| pipe.read_to_string(&mut stderr));
        Err(seen.unwrap_or(stderr))
    }

    /// Applies manifests in YAML or JSON.
    ///
    /// # Errors
    ///
    /// Same as [`Client::kubectl`].
    pub fn apply(&self, manifests: &str) -> Result<String, Error> {
        self.kubectl_with_input(&["apply", "-f", "-"], manifests)
    }

    /// Applies the CRDs in a directory, and its other objects. Waits until the API server serves
    /// all CRDs.
    ///
    /// # Errors
    ///
    /// Same as [`Client::kubectl`], and if a CRD is not established within 30 s.
    pub fn apply_crds(&self, folder: &Path) -> Result<(), Error> {
        let path = folder.to_string_lossy();
        self.kubectl(&["apply", "--server-side", "-f", &path])?;
        // kubectl caches for a long time that a resource is missing, so wait before the first use.
        self.kubectl(&["wait", "--for=condition=Established", "--timeout=30s", "crd", "--all"])?;
        Ok(())
    }

    /// Runs helm and returns its standard output.
    ///
    /// # Errors
    ///
    /// Same as [`Client::kubectl`].
    pub fn helm(&self, arguments: &[&str]) -> Result<String, Error> {
        let mut command = Command::new(programs::built("helm")?);
        command.env("KUBECONFIG", &self.kubeconfig).stdin(Stdio::null()).args(arguments);
        for name in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
            command.env(name, self.cache_folder.join(name.to_ascii_lowercase()));
        }
        finish(command, "")
    }

    /// Creates a token of a service account, for the API server or for another audience.
    ///
    /// # Errors
    ///
    /// Same as [`Client::kubectl`], for example if the account does not exist.
    pub fn token(
        &self,
        namespace: &str,
        account: &str,
        audience: Option<&str>,
    ) -> Result<String, Error> {
        let audience = audience.map(|audience| format!("--audience={audience}"));
        let mut arguments = vec!["create", "token", account, "-n", namespace, "--duration=8h"];
        arguments.extend(audience.as_deref());
        self.kubectl(&arguments).map(|token| token.trim().to_string())
    }
}

/// A process that ends with this value, also if a probe panics.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn finish(mut command: Command, input: &str) -> Result<String, Error> {
    let program = command.get_program().to_os_string();
    if !input.is_empty() {
        command.stdin(Stdio::piped());
    }
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().with_path(&program)?;
    let stdin = child.stdin.take();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Ignore the error: a program that does not read its whole input reports why.
            let _ = stdin.map(|mut stdin| stdin.write_all(input.as_bytes()));
        });
        child.wait_with_output()
    })
    .with_path(&program)
    .and_then(|output| stdout_of(&command, output))
}
