//! Starts this binary in a role and collects the results.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use stoker_api::contract::Termination;
use stoker_api::names::{ENV_POD_INDEX, ENV_TERMINATION_FILE, ENV_TRIAL_CONFIG};
use stoker_test_cluster::PATIENCE;
use tempfile::TempDir;

use super::ENV_ROLE;

/// A pod. Its directory contains the configuration, the storage and the output of its processes.
pub(crate) struct Pod {
    folder: TempDir,
    pub(crate) config: Value,
    environment: Vec<(String, String)>,
    has_config: bool,
    /// Options of `env`, which starts the processes.
    pub(crate) env_options: Vec<&'static str>,
    /// Network namespace of the processes, if they run in a separate one.
    pub(crate) host: Option<String>,
}

/// Results of a process.
#[derive(Debug)]
pub(crate) struct ProcessOutcome {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) errors: String,
    pub(crate) termination: Option<Termination>,
}

impl Pod {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = json!({
            "version": 1, "experiment": "x", "experimentId": "x", "trial": 0, "attempt": 3,
            "seed": 7, "experimentSeed": 7, "hyperparameters": {}, "unit": "batches", "units": 20,
            "metric": "val_loss", "smallerIsBetter": true, "schedulingUnit": 4,
            "aggregationFrequency": 1,
            "storage": {"url": folder.path().join("storage"), "trialPath": "trial"},
            "door": {"url": "http://127.0.0.1:1/", "tokenFile": folder.path().join("token")},
        });
        let env_options = vec![];
        Self { folder, config, environment: vec![], has_config: true, env_options, host: None }
    }

    /// Configures a gang, in which this pod has index 0 by default.
    pub(crate) fn gang(mut self, world_size: u32, ranks_per_pod: u32) -> Self {
        self.config["gang"] = json!({
            "worldSize": world_size, "ranksPerPod": ranks_per_pod,
            "rendezvous": "127.0.0.1:1", "secret": "5ec7e7",
        });
        self
    }

    pub(crate) fn index(self, index: u32) -> Self {
        self.env(ENV_POD_INDEX, &index.to_string())
    }

    pub(crate) fn env(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Starts processes without a trial.
    pub(crate) fn without_trial(self) -> Self {
        Self { has_config: false, ..self }
    }

    /// Returns the path of a file in this pod's directory.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Launches a shell script.
    pub(crate) fn launch_script(&self, script: &str) -> ProcessOutcome {
        self.launch(&["sh", "-c", script])
    }

    pub(crate) fn launch(&self, command: &[&str]) -> ProcessOutcome {
        self.wait(self.start_launch(command))
    }

    pub(crate) fn start_launch(&self, command: &[&str]) -> Child {
        self.start(&format!("launch {}", serde_json::to_string(command).unwrap()))
    }

    /// Starts this binary in a role.
    pub(crate) fn start(&self, role: &str) -> Child {
        let config = self.file("trial.json");
        std::fs::write(&config, self.config.to_string()).unwrap();
        let out = |name| std::fs::File::create(self.file(name)).unwrap();
        let itself = std::env::current_exe().unwrap();
        // Reset signals, because the tests themselves may run under `nohup`.
        let mut command = Command::new("env");
        command.arg("--default-signal=HUP,INT").args(&self.env_options);
        if let Some(host) = &self.host {
            command.args(["ip", "netns", "exec", host]);
        }
        command.arg(itself);
        if self.has_config {
            command.env(ENV_TRIAL_CONFIG, config);
        }
        command
            .current_dir(self.folder.path())
            .args(["--exact", "program", "--nocapture", "--test-threads=1"])
            .env(ENV_ROLE, role)
            .env(ENV_TERMINATION_FILE, self.file("termination"))
            .envs(self.environment.iter().cloned())
            .stdout(out("out"))
            .stderr(out("errors"))
            .stdin(Stdio::null())
            .spawn()
            .unwrap()
    }

    pub(crate) fn run(&self, role: &str) -> ProcessOutcome {
        self.wait(self.start(role))
    }

    pub(crate) fn wait(&self, mut child: Child) -> ProcessOutcome {
        let start = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            if start.elapsed() > PATIENCE {
                child.kill().unwrap();
                panic!("the process hangs: {}{}", self.text("out"), self.text("errors"));
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        let harness = ["running 1 test", "test program ... "];
        let out = self.text("out");
        let out = harness.iter().fold(out, |out, line| out.replacen(line, "", 1));
        let termination = std::fs::read(self.file("termination")).ok();
        ProcessOutcome {
            code: status.code().unwrap_or(-1),
            out: out.trim_start().to_owned(),
            errors: self.text("errors"),
            termination: termination.map(|text| serde_json::from_slice(&text).unwrap()),
        }
    }

    fn text(&self, name: &str) -> String {
        std::fs::read_to_string(self.file(name)).unwrap()
    }

    /// Reads a file in the storage directory of the trial.
    pub(crate) fn stored(&self, name: &str) -> String {
        let path = self.file("storage/trial").join(name);
        std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"))
    }
}

/// Waits until `is_so` returns `true`.
pub(crate) fn until(what: &str, is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "{what} took too long");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Returns `true` if a process exists and is not a zombie.
pub(crate) fn is_alive(pid: &str) -> bool {
    let stat = std::fs::read_to_string(Path::new("/proc").join(pid.trim()).join("stat"));
    stat.is_ok_and(|stat| !stat.contains(") Z "))
}
