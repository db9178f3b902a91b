//! Trainer without a model: counts batches, reports, and writes dummy checkpoints.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use stoker_api::contract::{
    CONTRACT_VERSION, CheckpointRef, Directive, ExitCode, Report, ReportEvent, TrialConfig,
};

/// Number of batches between two checkpoints.
const CHECKPOINT_EVERY: u64 = 5;

/// Trains with the configuration in the file `path` and returns the exit code.
pub(crate) fn train(path: &Path) -> i32 {
    let config: TrialConfig = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let stop = listen_for_sigterm();
    println!("trial {} attempt {} trains", config.trial, config.attempt);
    if let Some(folder) = config.data["pids"].as_str() {
        std::fs::write(Path::new(folder).join(std::process::id().to_string()), "").unwrap();
    }
    if config.data["script"] == "block-next-start" && config.attempt == 0 {
        // A directory in place of the temporary file makes the write of the configuration fail.
        let attempt = path.parent().unwrap().with_file_name("0-1");
        std::fs::create_dir_all(attempt.join("trial.json")).unwrap();
    }
    let trainer = Trainer { config, stop };
    trainer.train() as i32
}

fn listen_for_sigterm() -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    let shared = stop.clone();
    let (ready, wait) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let kind = tokio::signal::unix::SignalKind::terminate();
            let mut signal = tokio::signal::unix::signal(kind).unwrap();
            ready.send(()).unwrap();
            signal.recv().await;
            shared.store(true, Ordering::SeqCst);
            std::future::pending::<()>().await;
        });
    });
    wait.recv().unwrap();
    stop
}

/// Next action after a result.
enum Next {
    Exit(ExitCode),
    Train { units: u64 },
}

pub(crate) struct Trainer {
    pub(crate) config: TrialConfig,
    /// Set by SIGTERM.
    pub(crate) stop: Arc<AtomicBool>,
}

impl Trainer {
    fn train(&self) -> ExitCode {
        let script = self.config.data["script"].as_str().unwrap_or("");
        let resumed = self.config.resume_from.first();
        let batches_of = |checkpoint: &CheckpointRef| -> u64 {
            checkpoint.name.split('-').next().unwrap().parse().unwrap()
        };
        let mut batches = resumed.map_or(0, batches_of);
        match script {
            "fail" => return self.fail(),
            "block-next-start" if self.config.attempt == 0 => return self.fail(),
            "invalid-first" if self.config.trial == 0 => return ExitCode::InvalidHyperparameters,
            "knock" => self.knock(),
            "fault" if self.path("fault").exists() => return ExitCode::Infrastructure,
            "hold-gpu" => self.hold_gpu(),
            "old-token" if self.config.attempt == 0 => return self.leave_token(),
            "old-token" => self.use_old_token(),
            "population" => return self.train_population(),
            _ => {}
        }
        self.post(
            batches,
            ReportEvent::Started {
                resumed_from: resumed.map(|checkpoint| checkpoint.name.clone()),
                batches_total: self.config.units,
                refused: Default::default(),
            },
        );
        if script == "deaf" {
            self.checkpoint(1);
            std::thread::sleep(Duration::from_secs(600));
        }
        let mut units = self.config.units;
        loop {
            if batches >= units {
                match self.validate(batches, units) {
                    Next::Exit(code) => return code,
                    Next::Train { units: more } => units = more,
                }
            }
            std::thread::sleep(Duration::from_millis(
                self.config.data["sleepMs"].as_u64().unwrap_or(1),
            ));
            let is_held = self.is_held(batches);
            batches += u64::from(!is_held);
            if self.stop.load(Ordering::SeqCst) {
                self.checkpoint(batches);
                return ExitCode::Preempted;
            }
            let is_due = batches.is_multiple_of(CHECKPOINT_EVERY) && batches < units;
            if is_due && !is_held {
                self.checkpoint(batches);
            }
            if script == "metrics" {
                self.write_row("training", batches, self.training_loss(batches));
            }
            if batches == 7 && self.fails_at_seven(script) {
                return self.fail();
            }
            self.note(batches);
            let event = ReportEvent::Progress { batches_total: self.config.units, activity: None };
            match self.post(batches, event) {
                Directive::Fenced => return ExitCode::Infrastructure,
                Directive::Preempt => {
                    self.checkpoint(batches);
                    return ExitCode::Preempted;
                }
                _ => {}
            }
        }
    }

    /// Returns whether the program fails after batch 7.
    fn fails_at_seven(&self, script: &str) -> bool {
        match script {
            "crash-once" | "metrics" => self.config.attempt == 0,
            "fault-at-7" => self.path("fault").exists(),
            _ => false,
        }
    }

    /// Returns a path in the test's directory.
    fn path(&self, name: &str) -> PathBuf {
        Path::new(self.config.data["pids"].as_str().unwrap()).parent().unwrap().join(name)
    }

    /// Claims the visible GPUs for this trainer, and waits until `data.trainers` trainers have
    /// claimed theirs.
    fn hold_gpu(&self) {
        let visible = std::env::var("CUDA_VISIBLE_DEVICES").unwrap();
        let folder = self.path("gpus");
        std::fs::create_dir_all(&folder).unwrap();
        let file = std::fs::File::create_new(folder.join(&visible));
        file.unwrap_or_else(|error| panic!("{visible:?} is in use: {error}"));
        let wanted = self.config.data["trainers"].as_u64().unwrap();
        let end = std::time::Instant::now() + stoker_test_cluster::PATIENCE;
        while (std::fs::read_dir(&folder).unwrap().count() as u64) < wanted {
            assert!(std::time::Instant::now() < end, "the other trainers claimed no GPU");
            std::thread::sleep(Duration::from_millis(10));
        }
        if wanted == 1 {
            std::fs::remove_file(folder.join(visible)).unwrap();
        }
    }

    fn fail(&self) -> ExitCode {
        eprintln!("boom: the data has no labels");
        ExitCode::UserError
    }

    /// Reports the result at the granted length `units`, and waits for what follows.
    fn validate(&self, batches: u64, units: u64) -> Next {
        let metric = f64::from(self.config.seed % 1000) / 1000.0;
        if self.config.data["script"] == "metrics" {
            self.write_row("validation", batches, metric);
        }
        let metrics = [("loss".to_owned(), metric.to_string())].into();
        let event = ReportEvent::Validated { metrics, granted_units: Some(units) };
        let mut directive = self.post(batches, event);
        loop {
            match directive {
                Directive::Wait => std::thread::sleep(Duration::from_millis(10)),
                Directive::Continue { units } => return Next::Train { units },
                Directive::Preempt => {
                    self.checkpoint(batches);
                    return Next::Exit(ExitCode::Preempted);
                }
                Directive::Stop => break,
                Directive::Fenced => return Next::Exit(ExitCode::Infrastructure),
            }
            let event = ReportEvent::Progress { batches_total: units, activity: None };
            directive = self.post(batches, event);
        }
        self.save(batches, Some(metric.to_string()));
        let event = ReportEvent::Exiting { code: 0, message: None };
        self.post(batches, event);
        Next::Exit(ExitCode::Completed)
    }

    /// Returns `true` if the test holds the trial at this batch: `data.holdAt`, until the file
    /// `release` exists.
    fn is_held(&self, batches: u64) -> bool {
        let data = &self.config.data;
        let Some(folder) = data["pids"].as_str().filter(|_| data["holdAt"] == batches) else {
            return false;
        };
        !Path::new(folder).with_file_name("release").exists()
    }

    /// Writes the trial's index and the number of trained batches to a file for the test.
    fn note(&self, batches: u64) {
        if let Some(folder) = self.config.data["pids"].as_str() {
            let file = Path::new(folder).join(std::process::id().to_string());
            std::fs::write(file, format!("{} {batches}", self.config.trial)).unwrap();
        }
    }

    fn checkpoint(&self, batches: u64) {
        self.save(batches, None);
    }

    fn save(&self, batches: u64, metric: Option<String>) {
        self.save_model(batches, metric, "weights");
    }

    /// Saves a checkpoint with these weights.
    pub(crate) fn save_model(&self, batches: u64, metric: Option<String>, weights: &str) {
        let name = format!("{batches:012}-{}", self.config.attempt);
        let storage = &self.config.storage;
        let folder = Path::new(&storage.url).join(&storage.trial_path).join("checkpoints");
        std::fs::create_dir_all(folder.join(&name)).unwrap();
        std::fs::write(folder.join(&name).join("model"), weights).unwrap();
        std::fs::write(folder.join(&name).join("manifest.json"), "{}").unwrap();
        let manifest_sha256 = "0".repeat(64);
        let event = ReportEvent::Checkpointed { name, manifest_sha256, bytes: 7, metric };
        self.post(batches, event);
    }

    /// Sends requests that the report server must refuse.
    fn knock(&self) {
        let progress = ReportEvent::Progress { batches_total: 1, activity: None };
        let body = serde_json::to_string(&self.report(0, progress)).unwrap();
        assert_eq!(self.send("wrong", &body).0, 401);
        assert_eq!(self.send("", &body).0, 401);
        let token = self.token();
        assert_eq!(self.send(&token, "{").0, 400);
        assert_eq!(self.send(&token, &format!("\"{}\"", "x".repeat(2 << 20))).0, 413);
        let progress = ReportEvent::Progress { batches_total: 1, activity: None };
        let other = Report { attempt: 9, ..self.report(0, progress) };
        assert_eq!(self.send(&token, &serde_json::to_string(&other).unwrap()).0, 403);
        let elsewhere = ReportEvent::Checkpointed {
            name: "../../elsewhere".to_owned(),
            manifest_sha256: "0".repeat(64),
            bytes: 7,
            metric: None,
        };
        let elsewhere = serde_json::to_string(&self.report(0, elsewhere)).unwrap();
        assert_eq!(self.send(&token, &elsewhere).0, 422);
    }

    fn old_token_file(&self) -> PathBuf {
        Path::new(&self.config.storage.url).join("old-token")
    }

    fn leave_token(&self) -> ExitCode {
        std::fs::create_dir_all(&self.config.storage.url).unwrap();
        std::fs::write(self.old_token_file(), self.token()).unwrap();
        self.fail()
    }

    /// Sends reports with the token of the previous attempt; the reply must be `fenced`.
    fn use_old_token(&self) {
        let token = std::fs::read_to_string(self.old_token_file()).unwrap();
        let metrics = [("loss".to_owned(), "-1.0".to_owned())].into();
        let event = ReportEvent::Validated { metrics, granted_units: Some(self.config.units) };
        for attempt in [0, 1, 9] {
            let report = Report { attempt, ..self.report(self.config.units, event.clone()) };
            let answer = self.send(&token, &serde_json::to_string(&report).unwrap());
            assert_eq!(answer, (200, "\"fenced\"".to_owned()), "as attempt {attempt}");
        }
        assert_eq!(self.send(&token, "{").0, 200);
    }

    fn report(&self, batches: u64, event: ReportEvent) -> Report {
        Report { version: CONTRACT_VERSION, attempt: self.config.attempt, batches, event }
    }

    fn token(&self) -> String {
        std::fs::read_to_string(&self.config.report_endpoint.token_file).unwrap()
    }

    pub(crate) fn post(&self, batches: u64, event: ReportEvent) -> Directive {
        let body = serde_json::to_string(&self.report(batches, event)).unwrap();
        let (status, answer) = self.send(&self.token(), &body);
        assert_eq!(status, 200, "{answer}");
        serde_json::from_str(&answer).unwrap()
    }

    fn send(&self, token: &str, body: &str) -> (u16, String) {
        let rest = self.config.report_endpoint.url.strip_prefix("http://").unwrap();
        let (host, path) = rest.split_once('/').unwrap();
        let mut stream = TcpStream::connect(host).unwrap();
        let head = format!(
            "POST /{path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {token}\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            body.len()
        );
        // Ignore write errors: the server may reply and close before it has read the whole body.
        let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body.as_bytes()));
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8(answer).unwrap();
        let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
        (status, answer.split_once("\r\n\r\n").unwrap().1.to_owned())
    }
}
