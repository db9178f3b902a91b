//! What is counted, with names that stay and labels of few values.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};
use stoker_api::experiment::Phase;
use stoker_api::trial::AttemptEnd;

/// What a write, an end or an error is of.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Kind {
    /// One of a fixed list.
    pub kind: &'static str,
}

impl Kind {
    /// A trial's status.
    pub const TRIAL_STATUS: Self = Self { kind: "trial_status" };
    /// A trial's spec.
    pub const TRIAL_SPEC: Self = Self { kind: "trial_spec" };
    /// A new trial.
    pub const TRIAL_CREATE: Self = Self { kind: "trial_create" };
    /// An experiment's status.
    pub const EXPERIMENT_STATUS: Self = Self { kind: "experiment_status" };
    /// A new pod.
    pub const POD_CREATE: Self = Self { kind: "pod_create" };
    /// A pod's deletion.
    pub const POD_DELETE: Self = Self { kind: "pod_delete" };
    /// A job's status.
    pub const JOB_STATUS: Self = Self { kind: "job_status" };
    /// A new service.
    pub const SERVICE_CREATE: Self = Self { kind: "service_create" };
}

/// How a report was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum Answer {
    /// With a directive.
    Directive,
    /// It changed nothing.
    Repeat,
    /// It decides nothing and is recorded with the next one.
    Held,
    /// Its attempt is over.
    Fenced,
    /// It can never be taken.
    Refused,
    /// Whoever sent it may not.
    Unauthorized,
    /// Too many came.
    Limited,
    /// It may work later.
    Unavailable,
}

/// The label of [`Answer`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Answered {
    /// How.
    pub answer: Answer,
}

/// Everything that is counted.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// Writes to the API server.
    pub writes: Family<Kind, Counter>,
    /// Reconciles that were cut short.
    pub errors: Family<Kind, Counter>,
    /// Seconds of a reconcile, requests included.
    pub reconcile_seconds: Family<Kind, Histogram, fn() -> Histogram>,
    /// CPU seconds of reconciles.
    pub reconcile_cpu_seconds: Family<Kind, Counter<f64, AtomicU64>>,
    /// Attempts begun.
    pub attempts_started: Counter,
    ends: Family<Kind, Counter>,
    trial_ends: Family<Kind, Counter>,
    job_ends: Family<Kind, Counter>,
    /// Reports by how they were answered.
    pub reports: Family<Answered, Counter>,
    /// Reports that were delayed or refused because their namespace writes too much.
    pub reports_slowed: Counter,
    /// Seconds from a report to its answer, but for those that wait for a decision.
    pub report_seconds: Histogram,
    /// 1 where this replica leads.
    pub leader: Gauge,
    /// Objects in the caches.
    pub cached: Family<Kind, Gauge>,
    /// Keys that wait.
    pub queued: Family<Kind, Gauge>,
}

fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.000_1, 4.0, 10))
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("stoker");
        let it = Self {
            registry: Registry::default(),
            writes: Family::default(),
            errors: Family::default(),
            reconcile_seconds: Family::new_with_constructor(seconds),
            reconcile_cpu_seconds: Family::default(),
            attempts_started: Counter::default(),
            ends: Family::default(),
            trial_ends: Family::default(),
            job_ends: Family::default(),
            reports: Family::default(),
            reports_slowed: Counter::default(),
            report_seconds: seconds(),
            leader: Gauge::default(),
            cached: Family::default(),
            queued: Family::default(),
        };
        registry.register(
            "api_writes",
            "Writes to the API server, by what is written",
            it.writes.clone(),
        );
        registry.register("reconcile_errors", "Reconciles that were cut short", it.errors.clone());
        let help = "Time of a reconcile, requests included";
        registry.register_with_unit("reconcile", help, Unit::Seconds, it.reconcile_seconds.clone());
        let help =
            "CPU time of reconciles: reading, deciding, and what their requests take of a thread";
        let cpu = it.reconcile_cpu_seconds.clone();
        registry.register_with_unit("reconcile_cpu", help, Unit::Seconds, cpu);
        registry.register("attempts_started", "Attempts begun", it.attempts_started.clone());
        registry.register("attempts_ended", "Attempts ended, by how", it.ends.clone());
        registry.register("trials_ended", "Trials ended, by phase", it.trial_ends.clone());
        registry.register("jobs_ended", "Jobs ended, by phase", it.job_ends.clone());
        registry.register(
            "reports",
            "Reports of trainers, by how they were answered",
            it.reports.clone(),
        );
        registry.register(
            "reports_slowed",
            "Reports delayed or refused for now because their namespace needs too many status writes",
            it.reports_slowed.clone(),
        );
        let help = "Time from a report to its answer, but for those that wait for a decision";
        registry.register_with_unit("report", help, Unit::Seconds, it.report_seconds.clone());
        registry.register("leader", "1 where this replica leads", it.leader.clone());
        registry.register("cached_objects", "Objects in the caches, by kind", it.cached.clone());
        registry.register("queued", "Keys that wait to be looked at, by kind", it.queued.clone());
        Self { registry, ..it }
    }
}

fn of_phase(phase: Phase) -> Kind {
    let kind = match phase {
        Phase::Completed => "completed",
        Phase::Failed => "failed",
        _ => "cancelled",
    };
    Kind { kind }
}

/// CPU seconds of this thread so far.
fn thread_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// A future's result and the CPU seconds that it took, on whatever threads. What it leaves to other
/// tasks, as a connection that is shared, is not in them.
pub async fn with_cpu_seconds<T>(future: impl Future<Output = T>) -> (T, f64) {
    let mut future = pin!(future);
    let mut seconds = 0.0;
    let output = poll_fn(|context| {
        let begin = thread_seconds();
        let polled = future.as_mut().poll(context);
        seconds += thread_seconds() - begin;
        polled
    });
    let output = output.await;
    (output, seconds)
}

impl Metrics {
    /// Counts an attempt's end.
    pub fn attempt_ended(&self, end: AttemptEnd) {
        let kind = match end {
            AttemptEnd::Completed => "completed",
            AttemptEnd::Preempted => "preempted",
            AttemptEnd::InvalidHyperparameters => "invalid_hyperparameters",
            AttemptEnd::UserError => "user_error",
            AttemptEnd::Infrastructure => "infrastructure",
            AttemptEnd::RunnerLost => "runner_lost",
            AttemptEnd::NotStarted => "not_started",
        };
        self.ends.get_or_create(&Kind { kind }).inc();
    }

    /// Counts a trial's end.
    pub fn trial_ended(&self, phase: Phase) {
        self.trial_ends.get_or_create(&of_phase(phase)).inc();
    }

    /// Counts a job's end.
    pub fn job_ended(&self, phase: Phase) {
        self.job_ends.get_or_create(&of_phase(phase)).inc();
    }

    /// Everything as text in the OpenMetrics format.
    pub fn render(&self) -> String {
        let mut text = String::new();
        match prometheus_client::encoding::text::encode(&mut text, &self.registry) {
            Ok(()) => text,
            Err(error) => format!("# {error}\n"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn waiting_takes_no_cpu_time_and_working_does() {
        let waiting = tokio::time::sleep(std::time::Duration::from_millis(200));
        let (_, waited) = with_cpu_seconds(waiting).await;
        let working = async {
            for _ in 0..5 {
                let begin = thread_seconds();
                while thread_seconds() < begin + 0.01 {}
                tokio::task::yield_now().await;
            }
        };
        let (_, worked) = with_cpu_seconds(working).await;
        assert!((0.05..0.1).contains(&worked) && waited < 0.01, "{worked} {waited}");
    }

    #[test]
    fn names_and_labels_stay() {
        let metrics = Metrics::default();
        metrics.writes.get_or_create(&Kind::POD_CREATE).inc();
        metrics.attempt_ended(AttemptEnd::NotStarted);
        metrics.reports.get_or_create(&Answered { answer: Answer::Fenced }).inc();
        let text = metrics.render();
        for line in [
            "stoker_api_writes_total{kind=\"pod_create\"} 1",
            "stoker_attempts_ended_total{kind=\"not_started\"} 1",
            "stoker_reports_total{answer=\"Fenced\"} 1",
            "stoker_leader 0",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
    }
}
