//! Runs the scripts of `tests/browser` in a real browser.
//!
//! `STOKER_PICTURES=DIR` stores pictures of the page, and of a page that fails a test.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use stoker_test_cluster::{PATIENCE, record_skip};
use stoker_tests::{cache, repository};

/// The right to run the only browser: several of them would slow each other and all other tests.
pub(crate) struct Browser(#[expect(dead_code, reason = "held")] MutexGuard<'static, ()>);

impl Browser {
    /// Waits for the only browser.
    pub(crate) fn wait() -> Self {
        static BROWSER: Mutex<()> = Mutex::new(());
        Self(BROWSER.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Programs that the tests need.
pub(crate) struct Tools {
    chromium: PathBuf,
    /// Directory of Playwright and axe.
    packages: PathBuf,
}

impl Tools {
    /// Returns `None` if a program is missing: the calling test is then skipped.
    #[track_caller]
    pub(crate) fn find() -> Option<Self> {
        let on_path = |name: &str| {
            let path = std::env::var_os("PATH").unwrap_or_default();
            let mut paths = std::env::split_paths(&path).map(|folder| folder.join(name));
            paths.find(|path| path.exists())
        };
        let packages = cache().join("tools/browser-1");
        let Some(chromium) = on_path("chromium") else {
            record_skip("needs chromium: install the package, or run scripts/fetch-tools as root");
            return None;
        };
        if on_path("node").is_none() || !packages.join(".complete").exists() {
            record_skip("needs node and Playwright: run scripts/fetch-tools");
            return None;
        }
        Some(Self { chromium, packages })
    }

    /// Runs a script in `tests/browser` with an input, which contains the `url` of the page.
    /// Answers each command that the script prints.
    pub(crate) fn run(
        &self,
        _browser: &Browser,
        script: &str,
        input: &Value,
        mut answer: impl FnMut(&str) -> String,
    ) {
        let mut input = input.as_object().unwrap().clone();
        input.insert("tools".to_owned(), json!(self.packages));
        input.insert("chromium".to_owned(), json!(self.chromium));
        let errors = tempfile::NamedTempFile::new().unwrap();
        let process = Command::new("node")
            .arg(repository().join("tests/browser").join(script))
            .arg(Value::Object(input).to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors.reopen().unwrap())
            .spawn()
            .unwrap();
        let mut process = Process(process);
        let commands = BufReader::new(process.0.stdout.take().unwrap());
        let mut answers = process.0.stdin.take().unwrap();
        for command in commands.lines() {
            writeln!(answers, "{}", answer(&command.unwrap())).unwrap();
        }
        drop(answers);
        let status = process.0.wait().unwrap();
        let errors = std::fs::read_to_string(errors.path()).unwrap();
        assert!(status.success(), "{script} failed:\n{errors}");
    }
}

/// A process that dropping ends.
pub(crate) struct Process(pub(crate) Child);

impl Drop for Process {
    fn drop(&mut self) {
        // On an interrupt, node closes its browser, and `stoker run` waits for its trainers.
        let _ = kill_process(Pid::from_child(&self.0), Signal::INT);
        let end = Instant::now() + PATIENCE;
        while matches!(self.0.try_wait(), Ok(None)) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
