//! The server processes of a cluster, its directory, and the reaper process that cleans up both.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, SystemTime};

use crate::error::{Error, WithPath};
use crate::programs;

const REAPER_SCRIPT: &str = include_str!("reap.sh");

/// Number of log lines in error messages.
const TAIL_LINES: usize = 15;

/// Minimum age of a control plane's directory before it is swept: younger ones may not be locked
/// yet.
const SWEEP_AGE: Duration = Duration::from_secs(60);

/// Prefix of control planes' directories. Must match tests/cluster/down.
const PLANE_PREFIX: &str = "stoker-control-plane-";

/// Directory of the cluster with nodes. Must match tests/cluster/down. The path is fixed, because
/// only one such cluster can exist, and the next run must find what a killed one left behind.
const NODES_FOLDER: &str = "/var/lib/stoker-test-cluster";

/// A cluster's directory and processes. The processes end and the directory is removed when this is
/// dropped or when this process dies.
#[derive(Debug)]
pub(crate) struct Servers {
    folder: PathBuf,
    running: BTreeMap<String, Child>,
    reaper: Child,
    /// Standard input of the reaper, which cleans up when it is closed.
    reaper_stdin: Option<ChildStdin>,
}

impl Servers {
    /// Uses a new temporary directory.
    pub(crate) fn in_new_folder(keep: bool) -> Result<Self, Error> {
        sweep_old();
        let temporary = std::env::temp_dir();
        let folder =
            tempfile::Builder::new().prefix(PLANE_PREFIX).tempdir().with_path(temporary)?.keep();
        Self::start_reaper(folder.clone(), &folder.join("lock"), keep)
    }

    /// Uses the directory of the machine's only cluster with nodes, once no other process holds it.
    pub(crate) fn in_nodes_folder(keep: bool) -> Result<Self, Error> {
        let folder = PathBuf::from(NODES_FOLDER);
        Self::start_reaper(folder, Path::new(&format!("{NODES_FOLDER}.lock")), keep)
    }

    fn start_reaper(folder: PathBuf, lock: &Path, keep: bool) -> Result<Self, Error> {
        programs::require("flock")?;
        let mut reaper = reaper(&folder, lock, "hold", keep)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_path("bash")?;
        let mut words = BufReader::new(reaper.stdout.take().expect("it is piped")).lines();
        loop {
            match words.next().transpose().with_path("bash")?.as_deref() {
                Some("ready") => break,
                Some("waiting") => eprintln!("waiting for the cluster of another process"),
                Some("kept") => return Err(Error::Kept { folder }),
                _ => return Err(Error::Busy { lock: lock.to_path_buf() }),
            }
        }
        let reaper_stdin = reaper.stdin.take();
        Ok(Self { folder, running: BTreeMap::new(), reaper, reaper_stdin })
    }

    /// Directory of the cluster.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Starts a server. Its command line must contain the cluster's directory, by which a later run
    /// identifies the process.
    pub(crate) fn start(&mut self, name: &str, mut command: Command) -> Result<(), Error> {
        let log = self.log(name);
        let out = std::fs::File::options().create(true).append(true).open(&log).with_path(&log)?;
        let err = out.try_clone().with_path(&log)?;
        let child = command
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err)
            .current_dir(&self.folder)
            // Ctrl-C is for the tests. The servers end with the tests.
            .process_group(0)
            .spawn()
            .with_path(command.get_program())?;
        let path = self.folder.join("pids").join(name);
        std::fs::write(&path, format!("{}\n", child.id())).with_path(&path)?;
        self.running.insert(name.to_string(), child);
        Ok(())
    }

    /// Whether a server was started and not killed since.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.running.contains_key(name)
    }

    /// Fails with the last log lines if a server exited unexpectedly.
    pub(crate) fn check(&mut self, name: &str) -> Result<(), Error> {
        let log = self.log(name);
        let Some(child) = self.running.get_mut(name) else {
            return Ok(());
        };
        let Some(status) = child.try_wait().with_path(name)? else {
            return Ok(());
        };
        let text = std::fs::read(&log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<_> = text.lines().rev().take(TAIL_LINES).collect();
        let tail = lines.into_iter().rev().collect::<Vec<_>>().join("\n");
        Err(Error::ServerExited { name: name.to_string(), status, log, tail })
    }

    /// Runs [`check`](Self::check) for all servers.
    pub(crate) fn check_all(&mut self) -> Result<(), Error> {
        let names: Vec<String> = self.running.keys().cloned().collect();
        names.iter().try_for_each(|name| self.check(name))
    }

    /// Kills a server with SIGKILL. Does nothing if it does not run.
    pub(crate) fn kill(&mut self, name: &str) {
        if let Some(mut child) = self.running.remove(name) {
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = std::fs::remove_file(self.folder.join("pids").join(name));
    }

    /// Path of a server's log.
    pub(crate) fn log(&self, name: &str) -> PathBuf {
        self.folder.join("log").join(format!("{name}.log"))
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        drop(self.reaper_stdin.take());
        let _ = self.reaper.wait();
        for child in self.running.values_mut() {
            // Kept servers continue to run. Wait for killed ones, so that their memory is released.
            let _ = if self.folder.exists() { child.try_wait() } else { child.wait().map(Some) };
        }
    }
}

fn reaper(folder: &Path, lock: &Path, mode: &str, keep: bool) -> Command {
    let mut command = Command::new("bash");
    command.args(["-c", REAPER_SCRIPT, "reap"]).args([folder, lock]);
    command.args([mode, if keep { "1" } else { "0" }]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
    command
}

/// Removes control planes whose process and reaper have both died. If one cannot be removed, the
/// next run retries.
fn sweep_old() {
    let is_old = |path: &Path| {
        let age = |at: SystemTime| at.elapsed().unwrap_or_default();
        let modified = path.metadata().and_then(|metadata| metadata.modified());
        modified.is_ok_and(|at| age(at) > SWEEP_AGE)
    };
    let entries = std::fs::read_dir(std::env::temp_dir()).into_iter().flatten().flatten();
    let named =
        |entry: &std::fs::DirEntry| entry.file_name().to_string_lossy().starts_with(PLANE_PREFIX);
    let folders = entries.filter(named).map(|entry| entry.path());
    for folder in folders.filter(|folder| is_old(folder)) {
        let _ = reaper(&folder, &folder.join("lock"), "sweep", false).status();
    }
}
