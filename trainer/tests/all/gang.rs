//! Tests of gangs of several processes: same results as one rank, shared failures and stops.

use std::process::Child;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use stoker_api::contract::{Directive, Report, ReportEvent};
use stoker_storage::hash::sha256_hex;
use stoker_test_cluster::free_ports;

use crate::ENV_ROLE;
use crate::process::{Pod, ProcessOutcome, until};
use crate::report_server::ReportServer;
use crate::training::{ENV_FULL, ENV_MARK, ENV_OUT, ENV_SIGNAL};

/// Pods of one rank each, which share a storage as in a cluster.
pub(crate) struct Gang {
    pub(crate) pods: Vec<Pod>,
    pub(crate) server: ReportServer,
}

/// Grants 20 batches, then stops.
pub(crate) fn to_the_end(report: &Report) -> Directive {
    match report.event {
        ReportEvent::Validated { granted_units: Some(_), .. } => Directive::Stop,
        _ => Directive::Continue { units: 20 },
    }
}

impl Gang {
    pub(crate) fn new(size: u32, answer: impl Fn(&Report) -> Directive + Send + 'static) -> Self {
        let server = ReportServer::open(answer);
        let [port] = free_ports().unwrap();
        let mut pods: Vec<Pod> = vec![];
        for index in 0..size {
            let mut pod = Pod::new().index(index);
            std::fs::write(pod.file("token"), "one").unwrap();
            if let Some(first) = pods.first() {
                pod.config["storage"] = first.config["storage"].clone();
            }
            pod.config["door"]["url"] = json!(server.url);
            if size > 1 {
                pod = pod.gang(size, 1);
                pod.config["gang"]["rendezvous"] = json!(format!("127.0.0.1:{port}"));
            }
            let first = pods.first().unwrap_or(&pod);
            let out = first.file("").display().to_string();
            pods.push(pod.env(ENV_OUT, &out));
        }
        Self { pods, server }
    }

    pub(crate) fn env(mut self, name: &str, value: &str) -> Self {
        self.pods = self.pods.into_iter().map(|pod| pod.env(name, value)).collect();
        self
    }

    /// Sets these fields of the configuration on all ranks.
    pub(crate) fn with_config(mut self, fields: &Value) -> Self {
        for pod in &mut self.pods {
            for (name, value) in fields.as_object().unwrap() {
                pod.config[name] = value.clone();
            }
        }
        self
    }

    fn run(&self) -> Vec<ProcessOutcome> {
        self.run_as("train")
    }

    pub(crate) fn run_as(&self, role: &str) -> Vec<ProcessOutcome> {
        self.wait(self.pods.iter().map(|pod| start_as(pod, role)).collect())
    }

    /// Waits for the processes of all pods.
    pub(crate) fn wait(&self, children: Vec<Child>) -> Vec<ProcessOutcome> {
        self.pods.iter().zip(children).map(|(pod, child)| pod.wait(child)).collect()
    }

    /// Prepares the next attempt, which resumes from the latest checkpoint, if any.
    pub(crate) fn again(mut self) -> Self {
        let latest = self.latest().into_iter();
        let latest = latest.map(|(name, sha256)| json!({"name": name, "manifestSha256": sha256}));
        let latest: Vec<Value> = latest.collect();
        let [port] = free_ports().unwrap();
        for pod in &mut self.pods {
            pod.config["attempt"] = json!(pod.config["attempt"].as_u64().unwrap() + 1);
            pod.config["resumeFrom"] = json!(latest);
            if !pod.config["gang"].is_null() {
                pod.config["gang"]["rendezvous"] = json!(format!("127.0.0.1:{port}"));
            }
        }
        self.env(ENV_SIGNAL, "none 0 TERM")
    }

    /// Returns name and hash of the latest checkpoint.
    pub(crate) fn checkpoint(&self) -> (String, String) {
        self.latest().unwrap()
    }

    /// Same as [`checkpoint`](Self::checkpoint), or `None`. Ignores checkpoints without a manifest.
    pub(crate) fn latest(&self) -> Option<(String, String)> {
        let folder = self.pods[0].file("storage/trial/checkpoints");
        let names = std::fs::read_dir(&folder).into_iter().flatten();
        let complete = names.filter_map(|entry| {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let manifest = std::fs::read(folder.join(&name).join("manifest.json")).ok()?;
            Some((name, sha256_hex(&manifest)))
        });
        complete.max()
    }

    /// Returns what each rank wrote after training.
    pub(crate) fn trained(&self) -> Vec<Value> {
        (0..self.pods.len()).map(|rank| self.trained_by(rank)).collect()
    }

    /// Returns what a rank wrote after training.
    pub(crate) fn trained_by(&self, rank: usize) -> Value {
        let path = self.pods[0].file(&format!("{rank}.json"));
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
    }
}

pub(crate) fn start(pod: &Pod) -> Child {
    start_as(pod, "train")
}

pub(crate) fn start_as(pod: &Pod, role: &str) -> Child {
    start_with(pod, &[], role)
}

/// Same as [`start_as`], with a command that executes its arguments.
pub(crate) fn start_with(pod: &Pod, wrapper: &[&str], role: &str) -> Child {
    let itself = std::env::current_exe().unwrap();
    let role = format!("{ENV_ROLE}={role}");
    let itself = itself.to_str().unwrap();
    let harness = ["--exact", "program", "--nocapture", "--test-threads=1"];
    let mut command = wrapper.to_vec();
    command.extend(["env", role.as_str(), itself]);
    command.extend(harness);
    pod.start_launch(&command)
}

pub(crate) fn codes(left: &[ProcessOutcome]) -> Vec<i32> {
    left.iter().map(|process| process.code).collect()
}

/// Trains with this number of ranks and returns their common result.
pub(crate) fn trained(size: u32, is_full: bool, batches: u64) -> Value {
    trained_with(size, is_full, batches, json!({}))
}

/// Same as [`trained`], with these fields of the configuration.
fn trained_with(size: u32, is_full: bool, batches: u64, fields: Value) -> Value {
    let mut gang = Gang::new(size, to_the_end).with_config(&fields);
    gang.pods.iter_mut().for_each(|pod| pod.config["units"] = json!(batches));
    if is_full {
        gang = gang.env(ENV_FULL, "1");
    }
    let left = gang.run();
    assert_eq!(codes(&left), vec![0; size as usize], "{left:?}");
    let mut trained = gang.trained();
    for (rank, other) in trained.iter().enumerate() {
        assert!(*other == trained[0], "rank {rank} of {size} differs");
    }
    trained.swap_remove(0)
}

fn floats(trained: &Value) -> Vec<f32> {
    let bits = trained["weights"].as_array().unwrap().iter();
    bits.map(|bits| f32::from_bits(bits.as_u64().unwrap() as u32)).collect()
}

/// Returns the norm of the difference of all weights, relative to the norm of the weights.
fn relative_difference(one: &Value, other: &Value) -> f64 {
    let squares = |of: &mut dyn Iterator<Item = f32>| -> f64 {
        of.map(|value| f64::from(value).powi(2)).sum()
    };
    let mut differences = floats(one).into_iter().zip(floats(other)).map(|(a, b)| a - b);
    (squares(&mut differences) / squares(&mut floats(one).into_iter())).sqrt()
}

#[test]
fn several_ranks_match_one() {
    // Fifty optimizer steps of three batches each.
    let one = trained(1, false, 150);
    for size in [2, 3, 4] {
        let several = trained(size, false, 150);
        let difference = relative_difference(&one, &several);
        println!("{size} ranks differ from one by {difference:e} of its weights");
        assert!(difference > 0.0 && difference < 1e-6, "{size} ranks differ by {difference}");
        let of = |trained: &Value| trained["history"][29]["loss"].as_f64().unwrap();
        assert!((of(&one) / of(&several) - 1.0).abs() < 1e-6, "{size} ranks");
    }
}

#[test]
fn stopped_gang_resumes_bit_identical() {
    let straight = trained(2, true, 20);
    // A signal to either rank, at various points of the accumulation over three batches.
    for (rank, batch) in [(1, 1), (0, 5), (1, 8), (1, 13)] {
        let gang = Gang::new(2, to_the_end).env(ENV_FULL, "1");
        let gang = gang.env(ENV_SIGNAL, &format!("{rank} {batch} TERM"));
        let left = gang.run();
        assert_eq!(codes(&left), [79, 79], "{left:?}");
        let stopped: u64 = gang.checkpoint().0[..12].parse().unwrap();
        assert!((batch..20).contains(&stopped), "signal at {batch}, stopped after {stopped}");
        let gang = gang.again();
        let left = gang.run();
        assert_eq!(codes(&left), [0, 0], "{left:?}");
        for trained in gang.trained() {
            assert!(trained == straight, "rank {rank} stopped after {stopped}: weights differ");
        }
    }
}

#[test]
fn compressed_gradients_give_similar_weights() {
    let straight = trained(3, false, 60);
    for (compression, far) in [("f16", 2e-3), ("bf16", 2e-2)] {
        let fields = json!({ "gradientCompression": compression });
        let compressed = trained_with(3, false, 60, fields.clone());
        let difference = relative_difference(&straight, &compressed);
        println!("{compression} differs by {difference:e}");
        assert!(difference > 1e-6 && difference < far, "{compression} differs by {difference}");
        // A single rank sends no gradients.
        assert!(trained(1, false, 20) == trained_with(1, false, 20, fields), "{compression}");
    }
}

#[test]
fn mixed_precision_is_similar_and_resumable() {
    let fields = json!({ "mixedPrecision": "bf16" });
    let (full, half) = (trained(2, false, 60), trained_with(2, false, 60, fields.clone()));
    let difference = relative_difference(&full, &half);
    println!("bf16 differs by {difference:e}");
    assert!(difference > 1e-4 && difference < 0.1, "{difference}");
    let accuracy = |trained: &Value| trained["history"][11]["accuracy"].as_f64().unwrap();
    assert!((accuracy(&full) - accuracy(&half)).abs() < 0.05);
    // Weights are stored with more precision than bf16 has.
    let fine = floats(&half).into_iter().filter(|value| value.to_bits() & 0xffff != 0).count();
    assert!(fine > 200, "{fine} of {}", floats(&half).len());

    let straight = trained_with(2, true, 20, fields.clone());
    let gang = Gang::new(2, to_the_end).with_config(&fields).env(ENV_FULL, "1");
    let gang = gang.env(ENV_SIGNAL, "1 7 TERM");
    assert_eq!(codes(&gang.run()), [79, 79]);
    let gang = gang.again();
    let left = gang.run();
    assert_eq!(codes(&left), [0, 0], "{left:?}");
    let is_same = |trained: &Value| *trained == straight;
    assert!(gang.trained().iter().all(is_same), "weights differ after a stop");
}

#[test]
fn summed_gradients_differ_from_averaged() {
    // Unit tests check the values; this checks that the setting reaches the training loop.
    let mean = trained(2, false, 30);
    let sum = trained_with(2, false, 30, json!({ "averageAggregatedGradients": false }));
    let difference = relative_difference(&mean, &sum);
    assert!(difference > 1e-3, "{difference}");
}

#[test]
fn stopped_gang_resumes_with_fewer_ranks() {
    let one = trained(1, false, 20);
    let gang = Gang::new(2, to_the_end).env(ENV_SIGNAL, "1 7 TERM");
    assert_eq!(codes(&gang.run()), [79, 79]);
    let mut gang = gang.again();
    gang.pods.truncate(1);
    gang.pods[0].config["gang"] = Value::Null;
    let left = gang.run();
    assert_eq!(codes(&left), [0], "{left:?}");
    let difference = relative_difference(&one, &gang.trained()[0]);
    assert!(difference < 1e-6, "{difference}");
}

/// A process without other ranks blocks no other, so it is judged only by its own limit.
#[test]
fn hanging_process_ends_at_its_limit() {
    let gang = Gang::new(1, to_the_end)
        .env("STOKER_SILENCE_SECONDS", "6")
        .env("STOKER_SILENCE_STEPS", "0")
        .env(ENV_SIGNAL, "0 12 HANG");
    let left = gang.run().remove(0);
    assert_eq!(left.code, 80, "{left:#?}");
    let reason = left.termination.as_ref().and_then(|words| words.message.clone());
    let expected = "no progress for 6 s: last seen at step 11; if a step may take longer, increase \
                    STOKER_SILENCE_SECONDS";
    assert_eq!(reason.as_deref(), Some(expected), "{left:#?}");
}

#[test]
fn killed_rank_ends_the_others() {
    for killed in [0, 1, 2] {
        let gang = Gang::new(3, to_the_end).env(ENV_SIGNAL, &format!("{killed} 5 KILL"));
        let mark = gang.pods[0].file("mark");
        let gang = gang.env(ENV_MARK, &format!("0 4 {}", mark.display()));
        let children: Vec<Child> = gang.pods.iter().map(start).collect();
        until("the batch before the kill", || mark.exists());
        let begin = Instant::now();
        let left = gang.wait(children);
        let code = |rank: u32| if rank == killed { 137 } else { 81 };
        let expected: Vec<i32> = (0..3).map(code).collect();
        assert_eq!(codes(&left), expected, "{left:?}");
        assert!(begin.elapsed() < Duration::from_secs(60), "{killed}");
        let words = left[(killed as usize + 1) % 3].termination.as_ref().unwrap();
        let message = words.message.as_ref().unwrap();
        assert!(message.contains("lost the connection to rank"), "{words:?}");
    }
}

#[test]
fn directives_to_rank_0_apply_to_all() {
    let gang = Gang::new(2, |report| match report.batches {
        0..8 => Directive::Continue { units: 20 },
        _ => Directive::Preempt,
    });
    let left = gang.run();
    assert_eq!(codes(&left), [79, 79], "{left:?}");
    let reports = gang.server.reports.lock().unwrap();
    let started = |report: &&Report| matches!(report.event, ReportEvent::Started { .. });
    assert_eq!(reports.iter().filter(started).count(), 1, "{reports:?}");
    let saved = |report: &&Report| matches!(report.event, ReportEvent::Checkpointed { .. });
    assert_eq!(reports.iter().filter(saved).count(), 1, "{reports:?}");
    assert!(matches!(reports.last().unwrap().event, ReportEvent::Exiting { code: 79, .. }));
    let metrics = std::fs::read_dir(gang.pods[0].file("storage/trial/metrics")).unwrap();
    assert_eq!(metrics.count(), 1, "another rank also wrote metrics");
}

#[test]
fn missing_ranks_are_named_in_the_message() {
    let gang = Gang::new(3, to_the_end).env("STOKER_RENDEZVOUS_SECONDS", "1");
    let left = gang.pods[0].wait(start(&gang.pods[0]));
    assert_eq!(left.code, 80, "{left:?}");
    let message = left.termination.unwrap().message.unwrap();
    let expected = "of 3 ranks, 1, 2 did not connect to 127.0.0.1:";
    assert!(message.contains(expected), "{message}");
}
