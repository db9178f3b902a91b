//! The processes of a cluster, its folder, and the process beside them that ends them all.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, SystemTime};

use crate::error::{At, Error};
use crate::programs;

const REAP: &str = include_str!("reap.sh");

/// How much of a log a message shows.
const TAIL_LINES: usize = 15;

/// Folders of control planes that are younger are left alone: their lock may not be taken yet.
const SWEEP_AGE: Duration = Duration::from_secs(60);

/// What folders of control planes begin with, as tests/cluster/down has it.
const PLANE_PREFIX: &str = "stoker-control-plane-";

/// The folder of a cluster with nodes, as tests/cluster/down has it. There is one such cluster on a machine, so it is known where
/// the next run finds what a killed one left.
const NODES_FOLDER: &str = "/var/lib/stoker-test-cluster";

/// A cluster's folder and processes. All end, and the folder goes, when this is dropped or when this
/// process dies.
#[derive(Debug)]
pub(crate) struct Servers {
    folder: PathBuf,
    running: BTreeMap<String, Child>,
    reaper: Child,
    hold: Option<ChildStdin>,
}

impl Servers {
    /// In a new folder of the temporary ones.
    pub(crate) fn in_new_folder(keep: bool) -> Result<Self, Error> {
        sweep_old();
        let temporary = std::env::temp_dir();
        let folder = tempfile::Builder::new().prefix(PLANE_PREFIX).tempdir().at(temporary)?.keep();
        Self::hold(folder.clone(), &folder.join("lock"), keep)
    }

    /// In the folder of the machine's only cluster with nodes, once no other process has it.
    pub(crate) fn in_only_folder(keep: bool) -> Result<Self, Error> {
        let folder = PathBuf::from(NODES_FOLDER);
        Self::hold(folder, Path::new(&format!("{NODES_FOLDER}.lock")), keep)
    }

    fn hold(folder: PathBuf, lock: &Path, keep: bool) -> Result<Self, Error> {
        programs::need("flock")?;
        let mut reaper = reaper(&folder, lock, "hold", keep)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .at("bash")?;
        let mut words = BufReader::new(reaper.stdout.take().expect("it is piped")).lines();
        loop {
            match words.next().transpose().at("bash")?.as_deref() {
                Some("ready") => break,
                Some("waiting") => eprintln!("waiting for the cluster of another process"),
                Some("kept") => return Err(Error::Kept { folder }),
                _ => return Err(Error::Busy { lock: lock.to_path_buf() }),
            }
        }
        let hold = reaper.stdin.take();
        Ok(Self { folder, running: BTreeMap::new(), reaper, hold })
    }

    /// The cluster's folder.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Starts a server. Its command line must name the cluster's folder: that is how a later run
    /// knows it again.
    pub(crate) fn start(&mut self, name: &str, mut command: Command) -> Result<(), Error> {
        let log = self.log(name);
        let out = std::fs::File::options().create(true).append(true).open(&log).at(&log)?;
        let err = out.try_clone().at(&log)?;
        let child = command
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err)
            .current_dir(&self.folder)
            // Ctrl-C is for the tests; their end is the servers' end.
            .process_group(0)
            .spawn()
            .at(command.get_program())?;
        let path = self.folder.join("pids").join(name);
        std::fs::write(&path, format!("{}\n", child.id())).at(&path)?;
        self.running.insert(name.to_string(), child);
        Ok(())
    }

    /// Whether a server was started and not killed.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.running.contains_key(name)
    }

    /// Fails if a server ended by itself, with the end of its log.
    pub(crate) fn check(&mut self, name: &str) -> Result<(), Error> {
        let log = self.log(name);
        let Some(child) = self.running.get_mut(name) else {
            return Ok(());
        };
        let Some(status) = child.try_wait().at(name)? else {
            return Ok(());
        };
        let text = std::fs::read(&log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<_> = text.lines().rev().take(TAIL_LINES).collect();
        let tail = lines.into_iter().rev().collect::<Vec<_>>().join("\n");
        Err(Error::Ended { name: name.to_string(), status, log, tail })
    }

    /// [`Servers::check`] for all of them.
    pub(crate) fn check_all(&mut self) -> Result<(), Error> {
        let names: Vec<String> = self.running.keys().cloned().collect();
        names.iter().try_for_each(|name| self.check(name))
    }

    /// Kills a server at once, as a power cut does. Nothing happens if it does not run.
    pub(crate) fn kill(&mut self, name: &str) {
        if let Some(mut child) = self.running.remove(name) {
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = std::fs::remove_file(self.folder.join("pids").join(name));
    }

    /// Where a server writes what it does.
    pub(crate) fn log(&self, name: &str) -> PathBuf {
        self.folder.join("log").join(format!("{name}.log"))
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        drop(self.hold.take());
        let _ = self.reaper.wait();
        for child in self.running.values_mut() {
            // Kept ones run on; the others were killed, and have yet to be gone: their memory goes first.
            let _ = if self.folder.exists() { child.try_wait() } else { child.wait().map(Some) };
        }
    }
}

fn reaper(folder: &Path, lock: &Path, mode: &str, keep: bool) -> Command {
    let mut command = Command::new("bash");
    command.args(["-c", REAP, "reap"]).args([folder, lock]);
    command.args([mode, if keep { "1" } else { "0" }]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
    command
}

/// Removes control planes whose process died, and whose reaper did too. One that cannot be removed
/// stays for the next run.
fn sweep_old() {
    let is_old = |it: &Path| {
        let age = |at: SystemTime| at.elapsed().unwrap_or_default();
        it.metadata().and_then(|it| it.modified()).is_ok_and(|it| age(it) > SWEEP_AGE)
    };
    let entries = std::fs::read_dir(std::env::temp_dir()).into_iter().flatten().flatten();
    let named = |it: &std::fs::DirEntry| it.file_name().to_string_lossy().starts_with(PLANE_PREFIX);
    for folder in entries.filter(named).map(|it| it.path()).filter(|it| is_old(it)) {
        let _ = reaper(&folder, &folder.join("lock"), "sweep", false).status();
    }
}
