//! Tests of gangs with a custom training loop: under a runner, killed, preempted and prolonged.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use stoker_api::contract::{Directive, Report, ReportEvent};
use stoker_storage::Storage;
use stoker_storage::metrics;
use stoker_trainer::{Context, PreemptMode, Result, Session, Upload, mix_seed};

use crate::gang::{Gang, codes};
use crate::process::{Pod, until};
use crate::training::{ENV_OUT, ENV_PACE, ENV_SIGNAL, SIGNAL_PACE};

/// If set, ranks check for stop requests independently.
const ENV_THEMSELVES: &str = "TEST_THEMSELVES";

/// Batches in an epoch, and samples in a batch.
const SHAPE: (u64, usize) = (5, 8);

/// A line fitted to points by gradient descent; the points are distributed over the ranks.
#[derive(Clone, Debug, Default, PartialEq)]
struct Line {
    batches: u64,
    slope: f64,
    offset: f64,
}

impl Line {
    fn step(&mut self, context: &Context) -> Result<f64> {
        let ranks = context.distributed();
        let mut sums = [0.0; 3];
        for point in (ranks.rank()..SHAPE.1).step_by(ranks.size()) {
            let x = (mix_seed(&[self.batches, point as u64]) >> 40) as f64 / f64::from(1 << 24);
            let error = self.slope * x + self.offset - (3.0 * x - 1.0);
            sums[0] += error * x;
            sums[1] += error;
            sums[2] += error * error;
        }
        ranks.collective().sum_f64(&mut sums)?;
        self.slope -= 0.05 * sums[0];
        self.offset -= 0.05 * sums[1];
        self.batches += 1;
        Ok(sums[2] / SHAPE.1 as f64)
    }

    /// Stores a checkpoint with shares of the ranks: the first has the slope, the last the offset.
    fn store(&self, session: &Session<'_>) -> Result<()> {
        let info = session.info();
        let upload = Upload::at(self.batches).sharded().metadata("world", info.size);
        session.store_path(upload, |folder| {
            let write = |name: &str, value: f64| {
                std::fs::write(folder.join(name), value.to_bits().to_string())
            };
            if info.rank == 0 {
                write("slope", self.slope)?;
            }
            if info.rank + 1 == info.size {
                write("offset", self.offset)?;
            }
            Ok(())
        })?;
        Ok(())
    }
}

/// The program of one rank.
pub(crate) fn train() -> ExitCode {
    stoker_trainer::run(|context: &Context| {
        let mut session = context.session();
        if std::env::var_os(ENV_THEMSELVES).is_some() {
            session = session.preempt_mode(PreemptMode::WorkersAskThemselves);
        }
        let info = session.info();
        let restored = session.restore_path(|folder, saved| {
            let read = |name: &str| -> Result<f64> {
                Ok(f64::from_bits(std::fs::read_to_string(folder.join(name))?.parse()?))
            };
            Ok(Line { batches: saved.batches, slope: read("slope")?, offset: read("offset")? })
        })?;
        let mut line = restored.unwrap_or_default();
        let words_for = |name: &str| -> Option<Vec<String>> {
            let words: Vec<_> = std::env::var(name).ok()?.split(' ').map(str::to_owned).collect();
            (words[0] == info.rank.to_string()).then_some(words)
        };
        session.set_status("looking for a line");
        loop {
            while line.batches < session.length(SHAPE.0, SHAPE.1) {
                let loss = line.step(context)?;
                session.report_metrics("training", line.batches, [("loss", loss)])?;
                if line.batches.is_multiple_of(5) {
                    line.store(&session)?;
                }
                if let Some(words) = words_for(ENV_SIGNAL) {
                    let batch: u64 = words[1].parse()?;
                    if line.batches == batch {
                        let signal = if words[2] == "KILL" { Signal::KILL } else { Signal::TERM };
                        rustix::process::kill_process(rustix::process::getpid(), signal)?;
                    }
                    if line.batches >= batch {
                        std::thread::sleep(SIGNAL_PACE);
                    }
                }
                if let Some(words) = words_for(ENV_PACE) {
                    std::thread::sleep(Duration::from_millis(words[1].parse()?));
                }
                if let Some(why) = session.should_preempt()? {
                    if std::env::var_os(ENV_THEMSELVES).is_none() && !line.batches.is_multiple_of(5)
                    {
                        line.store(&session)?;
                    }
                    return Err(why.into());
                }
            }
            session.report_metrics("validation", line.batches, [("loss", line.slope)])?;
            if !line.batches.is_multiple_of(5) {
                line.store(&session)?;
            }
            if session.complete_length(line.batches)?.is_none() {
                let left = json!({"slope": line.slope.to_bits(), "offset": line.offset.to_bits()});
                let file =
                    PathBuf::from(std::env::var(ENV_OUT)?).join(format!("{}.json", info.rank));
                std::fs::write(file, left.to_string())?;
                return Ok(());
            }
        }
    })
}

/// Grants 12 batches, then 17, then stops.
fn prolongs(report: &Report) -> Directive {
    match report.event {
        ReportEvent::Validated { granted_units: Some(17), .. } => Directive::Stop,
        ReportEvent::Validated { granted_units: Some(12), .. } => Directive::Continue { units: 17 },
        _ if report.batches < 12 => Directive::Continue { units: 12 },
        _ => Directive::Continue { units: 17 },
    }
}

fn gang(size: u32, answer: impl Fn(&Report) -> Directive + Send + 'static) -> Gang {
    let mut gang = Gang::new(size, answer);
    gang.pods.iter_mut().for_each(|pod| pod.config["units"] = json!(12));
    gang
}

/// Returns the losses by batch, of attempts with these first batches.
fn losses(gang: &Gang, attempts: &[(u32, u64)]) -> Vec<(u64, u64)> {
    let storage = Storage::open(gang.pods[0].file("storage").to_str().unwrap(), None).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let rows = runtime.block_on(metrics::read(&storage, "trial", attempts)).unwrap();
    let training = rows.into_iter().filter(|row| row.group == "training");
    training.map(|row| (row.batches, row.metrics["loss"].to_bits())).collect()
}

/// Runs without interruption on this number of ranks.
fn straight(size: u32) -> (Vec<Value>, Vec<(u64, u64)>) {
    let gang = gang(size, prolongs);
    let left = gang.run_as("own");
    assert_eq!(codes(&left), vec![0; size as usize], "{left:?}");
    let losses = losses(&gang, &[(3, 0)]);
    let batches: Vec<_> = losses.iter().map(|(batches, _)| *batches).collect();
    assert_eq!(batches, (1..=17).collect::<Vec<_>>());
    (gang.trained(), losses)
}

#[test]
fn runner_prolongs_and_ends_a_custom_loop() {
    let gang = gang(2, prolongs);
    let left = gang.run_as("own");
    assert_eq!(codes(&left), [0, 0], "{left:?}");
    let trained = gang.trained();
    assert_eq!(trained[0], trained[1]);
    let reports = gang.server.reports.lock().unwrap();
    let results: Vec<_> = reports
        .iter()
        .filter_map(|report| match &report.event {
            ReportEvent::Validated { granted_units: Some(units), metrics } => {
                Some((report.batches, *units, metrics.keys().cloned().collect::<Vec<_>>()))
            }
            _ => None,
        })
        .collect();
    let loss = vec!["validation_loss".to_owned()];
    assert_eq!(results, [(12, 12, loss.clone()), (17, 17, loss)]);
    let is_started = |report: &&Report| matches!(report.event, ReportEvent::Started { .. });
    assert!(is_started(&&reports[0]) && reports.iter().filter(is_started).count() == 1);
    let activity = |report: &Report| match &report.event {
        ReportEvent::Progress { activity, .. } => activity.clone(),
        _ => None,
    };
    assert_eq!(reports.iter().find_map(activity).as_deref(), Some("looking for a line"));
    // A checkpoint is reported before the result at the same batch.
    let at = |wanted: &dyn Fn(&Report) -> bool| reports.iter().position(wanted).unwrap();
    let checkpointed = at(&|report| {
        report.batches == 12 && matches!(report.event, ReportEvent::Checkpointed { .. })
    });
    let result = at(&|report| {
        matches!(report.event, ReportEvent::Validated { granted_units: Some(12), .. })
    });
    assert!(checkpointed < result);
}

#[test]
fn preempted_gang_resumes_bit_identical() {
    let (trained, losses_straight) = straight(2);
    for batch in [3, 5, 13] {
        let gang = gang(2, prolongs).env(ENV_SIGNAL, &format!("1 {batch} TERM"));
        let left = gang.run_as("own");
        assert_eq!(codes(&left), [79, 79], "{left:?}");
        let gang = gang.again();
        // A signal takes effect a few batches after it was sent.
        let (name, _) = gang.checkpoint();
        let stopped_at: u64 = name.split_once('-').unwrap().0.parse().unwrap();
        assert!(stopped_at >= batch, "{name}");
        let left = gang.run_as("own");
        assert_eq!(codes(&left), [0, 0], "{left:?}");
        assert_eq!(gang.trained(), trained, "signal at {batch}");
        assert_eq!(losses(&gang, &[(3, 0), (4, stopped_at)]), losses_straight, "signal at {batch}");
    }
}

#[test]
fn killed_rank_resumes_bit_identical() {
    let (trained, losses_straight) = straight(2);
    for rank in [0, 1] {
        let gang = gang(2, prolongs).env(ENV_SIGNAL, &format!("{rank} 8 KILL"));
        let left = gang.run_as("own");
        assert!(codes(&left).iter().all(|code| *code != 0), "{left:?}");
        let gang = gang.again();
        let left = gang.run_as("own");
        assert_eq!(codes(&left), [0, 0], "{left:?}");
        assert_eq!(gang.trained(), trained, "rank {rank}");
        assert_eq!(losses(&gang, &[(3, 0), (4, 5)]), losses_straight, "rank {rank}");
    }
}

/// In this mode, no call is collective: heartbeats notify the ranks.
#[test]
fn independent_ranks_learn_of_preemption_by_heartbeat() {
    let answer = |report: &Report| match report.batches {
        0..6 => Directive::Continue { units: 100_000 },
        _ => Directive::Preempt,
    };
    let mut gang = gang(2, answer).env(ENV_THEMSELVES, "1").env(ENV_PACE, "0 5");
    gang.pods.iter_mut().for_each(|pod| pod.config["units"] = json!(100_000));
    let left = gang.run_as("own");
    // After one rank has exited, the other may fail in its next collective call.
    let codes = codes(&left);
    assert!(codes[0] == 79 && [79, 81].contains(&codes[1]), "{left:?}");
}

#[test]
fn sigusr1_prints_threads_and_continues() {
    let pod = Pod::new().env(ENV_PACE, "0 100");
    let out = pod.file("").display().to_string();
    // The trial runs until SIGTERM, so it cannot end before SIGUSR1 arrives.
    let answer = |_: &Report| Directive::Continue { units: 100_000 };
    let server = crate::report_server::ReportServer::open(answer);
    let mut pod = pod.env(ENV_OUT, &out);
    std::fs::write(pod.file("token"), "one").unwrap();
    pod.config["door"]["url"] = json!(server.url);
    pod.config["units"] = json!(100_000);
    let child = crate::gang::start_as(&pod, "own");
    let batches = || server.reports.lock().unwrap().last().map_or(0, |report| report.batches);
    until("a first report", || batches() > 1);
    let launcher = rustix::process::Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    rustix::process::kill_process(launcher, Signal::USR1).unwrap();
    let is_in = |name: &str| {
        std::fs::read_to_string(pod.file(name)).unwrap().contains("stoker: rank 0, process ")
    };
    until("the list of threads", || is_in("out") || is_in("errors"));
    let printed_at = batches();
    until("a later report", || batches() > printed_at);
    rustix::process::kill_process(launcher, Signal::TERM).unwrap();
    let left = pod.wait(child);
    assert_eq!(left.code, 79, "{left:?}");
    let text = format!("{}{}", left.out, left.errors);
    assert!(text.contains("stoker: rank 0, process "), "{text}");
    assert!(text.contains(", last reported batch "), "{text}");
    assert!(text.contains(" stoker-backgrou "), "{text}");
}
