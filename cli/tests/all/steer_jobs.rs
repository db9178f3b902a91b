//! Tests of commands that pause, end, follow and delete local jobs.

use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

use serde_json::{Value, json};

use crate::fixture::{Lines, check, files, signal, stoker, wait_until};

/// A local job whose first process notes its start, and waits for the file `release`.
struct JobFixture {
    folder: tempfile::TempDir,
}

impl JobFixture {
    /// Creates a job. `on_stop` is the action of its process on SIGTERM.
    fn new(on_stop: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let script = format!(
            "trap '{on_stop}' TERM; echo started; echo x >>starts; \
             while [ ! -e release ]; do sleep 0.05; done; echo over; exit 78"
        );
        let job = json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceJob",
            "metadata": {"name": "species"},
            "spec": {
                "entrypoint": {"command": ["sh", "-c", script]},
                "checkpoint": {"trial": "iris-0"}, "input": {"url": "rows.csv"},
            },
        });
        std::fs::write(folder.path().join("job.yaml"), job.to_string()).unwrap();
        Self { folder }
    }

    /// Creates a job whose processes exit with code 0 and leave no output in `out`.
    fn without_output() -> Self {
        let fixture = Self::new("");
        let mut job: Value =
            serde_json::from_slice(&std::fs::read(fixture.path("job.yaml")).unwrap()).unwrap();
        job["spec"]["entrypoint"]["command"] = json!(["true"]);
        job["spec"]["output"] = json!({"url": "out"});
        std::fs::write(fixture.path("job.yaml"), job.to_string()).unwrap();
        fixture
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn stoker(&self, arguments: &str) -> Command {
        let mut command = stoker();
        command.args(arguments.split_whitespace()).arg("--root").arg(self.path("root"));
        command.current_dir(self.folder.path()).stdin(Stdio::null());
        command
    }

    #[track_caller]
    fn check(&self, arguments: &str, code: i32, contains: &str) -> String {
        let output = self.stoker(arguments).output().unwrap();
        check(&output, code, contains);
        String::from_utf8(output.stdout).unwrap()
    }

    fn run(&self) -> Output {
        self.stoker("job run job.yaml").output().unwrap()
    }

    /// Starts the job, and waits until its process has started.
    fn start(&self) -> Child {
        let mut command = self.stoker("job run job.yaml");
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        self.wait_for_starts(1);
        child
    }

    fn num_starts(&self) -> usize {
        std::fs::read_to_string(self.path("starts")).map_or(0, |text| text.lines().count())
    }

    fn wait_for_starts(&self, num: usize) {
        wait_until("the start of the process", || self.num_starts() == num);
    }

    fn release(&self) {
        std::fs::write(self.path("release"), "").unwrap();
    }

    fn record(&self) -> PathBuf {
        let runs = files(&self.path("root/local"));
        runs.iter().find(|path| path.is_dir()).expect("no job").join("record")
    }

    fn job(&self) -> Value {
        serde_json::from_slice(&std::fs::read(self.record().join("job.json")).unwrap()).unwrap()
    }

    fn wait_for_phase(&self, phase: &str) {
        wait_until(phase, || self.job()["status"]["phase"] == phase);
    }
}

#[test]
fn paused_job_resumes() {
    let fixture = JobFixture::new("exit 79");
    let child = fixture.start();
    fixture.check("job pause species", 0, "its workers exit after their current batch");
    fixture.wait_for_phase("Paused");
    assert_eq!(fixture.job()["spec"]["state"], "paused");
    fixture.check("job list", 0, "Paused");
    fixture.check("job activate species", 0, "job species resumes");
    fixture.wait_for_starts(2);
    fixture.release();
    let output = child.wait_with_output().unwrap();
    check(&output, 1, "paused; 1 processes exit after their current batch");
    check(&output, 1, "activated: the job resumes");
    fixture.check("job wait species", 1, "job species ended (Failed)");
}

#[test]
fn job_without_runner_stays_paused_until_activated() {
    let fixture = JobFixture::new("exit 79");
    let child = fixture.start();
    signal(&child, rustix::process::Signal::TERM);
    let remedy = "rows done; run the same command again, without --fresh, to resume\n";
    check(&child.wait_with_output().unwrap(), 3, remedy);
    fixture.check("job wait species", 3, "job species has stopped: no runner is alive");
    fixture.check("job pause species", 0, "is paused; no runner is alive");
    let mut command = fixture.stoker("job run job.yaml");
    let mut waiting = command.stderr(Stdio::piped()).spawn().unwrap();
    let lines = std::io::BufReader::new(waiting.stderr.take().unwrap());
    let mut lines = std::io::BufRead::lines(lines);
    assert!(lines.any(|line| line.unwrap().starts_with("paused; `stoker job activate species")));
    signal(&waiting, rustix::process::Signal::TERM);
    let remedy = "to resume; the job stays paused until `stoker job activate species-";
    assert!(lines.any(|line| line.unwrap().contains(remedy)));
    assert_eq!(waiting.wait().unwrap().code(), Some(3));
    assert_eq!(fixture.num_starts(), 1, "a paused job has started a process");
    fixture.check("job activate species", 0, "`stoker job run FILE` runs it");
    fixture.release();
    check(&fixture.run(), 1, "");
    assert_eq!(fixture.num_starts(), 2);
}

#[test]
fn cancelled_and_killed_jobs_end() {
    for (verb, on_stop) in [("cancel", "exit 79"), ("kill", "")] {
        let fixture = JobFixture::new(on_stop);
        let child = fixture.start();
        fixture.check(&format!("job {verb} species"), 0, "job species is being");
        check(&child.wait_with_output().unwrap(), 3, "rows done");
        assert_eq!(fixture.job()["status"]["phase"], "Cancelled");
        check(&fixture.run(), 3, "was cancelled already; use --fresh to start over");
        fixture.check("job wait species", 3, "job species ended (Cancelled)");
        fixture.check("job activate species", 2, "it has ended (Cancelled)");
    }
}

#[test]
fn job_without_runner_is_cancelled_at_once() {
    let fixture = JobFixture::new("exit 79");
    let mut child = fixture.start();
    child.kill().unwrap();
    child.wait().unwrap();
    fixture.check("job cancel species", 0, "is cancelled; no runner was alive");
    assert_eq!(fixture.job()["status"]["phase"], "Cancelled");
}

#[test]
fn job_without_output_in_a_used_directory_fails() {
    let fixture = JobFixture::without_output();
    let manifest = json!({
        "format": 1, "job": "other", "jobId": "77aa0b3f9c1e", "outputFormat": "jsonLines",
        "rows": 0, "inputRows": 0, "rejected": 0, "parts": [], "input": [],
    });
    std::fs::create_dir(fixture.path("out")).unwrap();
    std::fs::write(fixture.path("out/manifest.json"), manifest.to_string()).unwrap();
    check(&fixture.run(), 1, "contains the output of job other-77aa0b3f although all processes");
    assert_eq!(fixture.job()["status"]["phase"], "Failed");
}

#[test]
fn job_completes_after_its_output_is_checked() {
    let fixture = JobFixture::without_output();
    std::fs::create_dir(fixture.path("out")).unwrap();
    // A link to itself cannot be read, not even by root.
    let manifest = fixture.path("out/manifest.json");
    std::os::unix::fs::symlink("manifest.json", &manifest).unwrap();
    check(&fixture.run(), 1, "; run the same command again, without --fresh, to resume");
    assert_eq!(fixture.job()["status"]["phase"], "Running");
    std::fs::remove_file(manifest).unwrap();
    check(&fixture.run(), 1, "no output found although all processes exited with code 0");
    assert_eq!(fixture.job()["status"]["phase"], "Failed");
}

#[test]
fn job_with_a_runner_is_not_deleted() {
    let fixture = JobFixture::new("exit 79");
    let child = fixture.start();
    fixture.check("job delete species", 2, &format!("`species`: process {} on", child.id()));
    fixture.release();
    check(&child.wait_with_output().unwrap(), 1, "");
    let output = fixture.path("root/default").join("kept");
    std::fs::write(&output, "").unwrap();
    fixture.check("job delete species", 0, "its output remains in");
    assert!(files(&fixture.path("root/local")).iter().all(|path| path.is_file()));
    assert!(output.exists());
    fixture.check("job logs species", 2, "no run of job `species`");
}

#[test]
fn followed_logs_of_a_job_contain_each_line_once() {
    let fixture = JobFixture::new("echo stopping; exit 79");
    let child = fixture.start();
    let mut lines = Lines::start(&mut fixture.stoker("job logs species --follow"));
    assert_eq!(lines.next().as_deref(), Some("started"));
    fixture.check("job pause species", 0, "");
    fixture.wait_for_phase("Paused");
    fixture.check("job activate species", 0, "");
    fixture.release();
    check(&child.wait_with_output().unwrap(), 1, "");
    let rest: Vec<String> = lines.collect();
    let all = fixture.check("job logs species", 0, "");
    assert_eq!(all.lines().skip(1).collect::<Vec<_>>(), rest);
    // The shell may add a line about the end of its `sleep`.
    let words = rest.iter().filter(|line| *line != "Terminated").collect::<Vec<_>>();
    assert_eq!(words, ["stopping", "started", "over"]);
}

#[test]
fn failed_write_of_the_record_is_repeated() {
    let fixture = JobFixture::new("");
    let mut child = fixture.start();
    // A directory in place of the temporary file makes writes fail.
    let blocked = fixture.record().join("job.json.new");
    std::fs::create_dir(&blocked).unwrap();
    fixture.release();
    let lines = std::io::BufReader::new(child.stderr.take().unwrap());
    let mut lines = std::io::BufRead::lines(lines);
    assert!(lines.any(|line| line.unwrap().ends_with("; the job continues, trying again")));
    std::fs::remove_dir(&blocked).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(1));
    assert_eq!(fixture.job()["status"]["phase"], "Failed");
}
