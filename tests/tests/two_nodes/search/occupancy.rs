//! Time during which GPUs have no gang while trials wait.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use serde_json::Value;
use stoker_test_cluster::Cluster;

use crate::two_nodes::NAMESPACE;

/// Seconds of GPU time of a search.
#[derive(Clone, Debug)]
pub(super) struct Seconds {
    num_gpus: usize,
    gangs: BTreeMap<String, String>,
    runnable: BTreeSet<String>,
    begun: Option<Instant>,
    now: Instant,
    idle: f64,
    all: f64,
}

impl Seconds {
    /// Share of the GPU time without a gang while trials wait.
    pub(super) fn idle_share(&self) -> f64 {
        self.idle / self.all
    }

    /// Adds the time since the last call. It begins with the first gang.
    fn advance(&mut self) {
        let now = Instant::now();
        let seconds = (now - self.now).as_secs_f64();
        self.now = now;
        if self.begun.is_none() && !self.gangs.is_empty() {
            self.begun = Some(now);
        } else if self.begun.is_some() {
            let with_gang: BTreeSet<&String> = self.gangs.values().collect();
            let num_waiting =
                self.runnable.iter().filter(|trial| !with_gang.contains(trial)).count();
            let num_free = self.num_gpus.saturating_sub(self.gangs.len());
            self.idle += seconds * num_free.min(num_waiting) as f64;
            self.all += seconds * self.num_gpus as f64;
        }
    }

    /// Takes an event of a pod. A gang is a pod that has a node and has not ended.
    fn pod(&mut self, is_deleted: bool, pod: &Value) {
        let name = pod["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        let has_node = pod["spec"]["nodeName"].is_string();
        let has_ended = matches!(pod["status"]["phase"].as_str(), Some("Succeeded" | "Failed"));
        if has_node && !has_ended && !is_deleted {
            let trial = pod["metadata"]["labels"]["stoker.dev/trial"].as_str().unwrap_or_default();
            self.gangs.insert(name, trial.to_owned());
        } else {
            self.gangs.remove(&name);
        }
    }

    /// Takes an event of a trial. It can run if the search and the user want it to.
    fn trial(&mut self, is_deleted: bool, trial: &Value) {
        let name = trial["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        let is_wanted = matches!(trial["spec"]["wanted"].as_str(), None | Some("run"));
        let has_ended = trial["status"]["endedAt"].is_string();
        if is_wanted && !has_ended && !is_deleted {
            self.runnable.insert(name);
        } else {
            self.runnable.remove(&name);
        }
    }
}

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { num_gpus, all, idle, .. } = self;
        let share = 100.0 * self.idle_share();
        write!(f, "{num_gpus} GPUs for {all:.0} GPU seconds, {idle:.1} ({share:.1} %) of them ")?;
        write!(f, "without a gang while trials waited")
    }
}

/// Watches of an experiment's pods and trials.
#[derive(Debug)]
pub(super) struct Occupancy {
    seconds: Arc<Mutex<Seconds>>,
    watches: Vec<Child>,
}

impl Occupancy {
    /// Watches an experiment that does not exist yet.
    pub(super) fn watch(cluster: &Cluster, experiment: &str, num_gpus: usize) -> Self {
        let seconds = Seconds {
            num_gpus,
            gangs: BTreeMap::new(),
            runnable: BTreeSet::new(),
            begun: None,
            now: Instant::now(),
            idle: 0.0,
            all: 0.0,
        };
        let seconds = Arc::new(Mutex::new(seconds));
        let watches = [("pods", Seconds::pod as Take), ("trials", Seconds::trial)]
            .map(|(kind, take)| watch(cluster, experiment, kind, take, seconds.clone()));
        Self { seconds, watches: watches.into() }
    }

    /// Ends the watches, and returns the times until now.
    pub(super) fn end(self) -> Seconds {
        let mut seconds = self.seconds.lock().unwrap_or_else(PoisonError::into_inner);
        seconds.advance();
        seconds.clone()
    }
}

impl Drop for Occupancy {
    fn drop(&mut self) {
        for watch in &mut self.watches {
            // Ignore the error: the watch may have ended by itself.
            let _ = watch.kill();
            let _ = watch.wait();
        }
    }
}

type Take = fn(&mut Seconds, bool, &Value);

/// Starts `kubectl get --watch`, and takes its events in a thread.
fn watch(
    cluster: &Cluster,
    experiment: &str,
    kind: &str,
    take: Take,
    seconds: Arc<Mutex<Seconds>>,
) -> Child {
    let label = format!("stoker.dev/experiment={experiment}");
    let options = ["--watch", "--output-watch-events", "--output=json"];
    let command = ["get", kind, "--namespace", NAMESPACE, "--selector", &label];
    let mut command = cluster.kubectl_command(&[&command[..], &options].concat());
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let events = std::io::BufReader::new(child.stdout.take().unwrap());
    std::thread::spawn(move || {
        let events = serde_json::Deserializer::from_reader(events).into_iter::<Value>();
        for event in events.map_while(Result::ok) {
            let mut seconds = seconds.lock().unwrap_or_else(PoisonError::into_inner);
            seconds.advance();
            take(&mut seconds, event["type"] == "DELETED", &event["object"]);
        }
    });
    child
}
