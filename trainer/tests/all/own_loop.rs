//! Gangs whose loop is the program's own: under a runner, killed, asked to leave, prolonged.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use stoker_api::contract::{Directive, Report, ReportEvent};
use stoker_storage::Storage;
use stoker_storage::metrics;
use stoker_trainer::{Context, PreemptMode, Result, Session, Upload, key};

use crate::gang::{Gang, codes};
use crate::process::{Pod, until};
use crate::training::{ENV_OUT, ENV_PACE, ENV_SIGNAL};

/// Set: each rank asks for itself whether to leave.
const ENV_THEMSELVES: &str = "TEST_THEMSELVES";

/// Batches of an epoch, and samples of a batch.
const SHAPE: (u64, usize) = (5, 8);

/// A line through points, found by steps down the gradient; each rank has every so-manieth point.
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
            let x = (key(&[self.batches, point as u64]) >> 40) as f64 / f64::from(1 << 24);
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

    /// All ranks' shares: the first has one number, the last the other.
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

/// The whole program of one rank.
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
        let mine = |name: &str| -> Option<Vec<String>> {
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
                if let Some(words) = mine(ENV_SIGNAL).filter(|it| it[1] == line.batches.to_string())
                {
                    let signal = if words[2] == "KILL" { Signal::KILL } else { Signal::TERM };
                    rustix::process::kill_process(rustix::process::getpid(), signal)?;
                }
                if let Some(words) = mine(ENV_PACE) {
                    std::thread::sleep(Duration::from_millis(words[1].parse()?));
                }
                if let Some(why) = session.asked_to_leave()? {
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
            if session.reach(line.batches)?.is_none() {
                let left = json!({"slope": line.slope.to_bits(), "offset": line.offset.to_bits()});
                let file =
                    PathBuf::from(std::env::var(ENV_OUT)?).join(format!("{}.json", info.rank));
                std::fs::write(file, left.to_string())?;
                return Ok(());
            }
        }
    })
}

/// Grants 12 batches, then 17, and is content.
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
    gang.pods.iter_mut().for_each(|it| it.config["units"] = json!(12));
    gang
}

/// The losses by batches, of attempts that started at these.
fn losses(gang: &Gang, attempts: &[(u32, u64)]) -> Vec<(u64, u64)> {
    let storage = Storage::open(gang.pods[0].file("storage").to_str().unwrap(), None).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let rows = runtime.block_on(metrics::read(&storage, "trial", attempts)).unwrap();
    let training = rows.into_iter().filter(|it| it.group == "training");
    training.map(|it| (it.batches, it.metrics["loss"].to_bits())).collect()
}

/// Runs it straight on so many ranks.
fn straight(size: u32) -> (Vec<Value>, Vec<(u64, u64)>) {
    let gang = gang(size, prolongs);
    let left = gang.run_as("own");
    assert_eq!(codes(&left), vec![0; size as usize], "{left:?}");
    let losses = losses(&gang, &[(3, 0)]);
    assert_eq!(losses.iter().map(|it| it.0).collect::<Vec<_>>(), (1..=17).collect::<Vec<_>>());
    (gang.trained(), losses)
}

#[test]
fn a_runner_prolongs_and_ends_a_loop_and_learns_what_it_does() {
    let gang = gang(2, prolongs);
    let left = gang.run_as("own");
    assert_eq!(codes(&left), [0, 0], "{left:?}");
    let trained = gang.trained();
    assert_eq!(trained[0], trained[1]);
    let reports = gang.door.reports.lock().unwrap();
    let results: Vec<_> = reports
        .iter()
        .filter_map(|it| match &it.event {
            ReportEvent::Validated { granted_units: Some(units), metrics } => {
                Some((it.batches, *units, metrics.keys().cloned().collect::<Vec<_>>()))
            }
            _ => None,
        })
        .collect();
    let loss = vec!["validation_loss".to_owned()];
    assert_eq!(results, [(12, 12, loss.clone()), (17, 17, loss)]);
    let is_started = |it: &Report| matches!(it.event, ReportEvent::Started { .. });
    assert!(is_started(&reports[0]) && reports.iter().filter(|it| is_started(it)).count() == 1);
    let says = |it: &Report| match &it.event {
        ReportEvent::Progress { activity, .. } => activity.clone(),
        _ => None,
    };
    assert_eq!(reports.iter().find_map(says).as_deref(), Some("looking for a line"));
    // A checkpoint is told before the result at its batch.
    let at = |wanted: &dyn Fn(&Report) -> bool| reports.iter().position(wanted).unwrap();
    let checkpointed =
        at(&|it| it.batches == 12 && matches!(it.event, ReportEvent::Checkpointed { .. }));
    let result =
        at(&|it| matches!(it.event, ReportEvent::Validated { granted_units: Some(12), .. }));
    assert!(checkpointed < result);
}

#[test]
fn a_rank_that_is_asked_to_leave_takes_the_gang_with_it_and_all_go_on_to_the_same_bits() {
    let (trained, losses_straight) = straight(2);
    for batch in [3, 5, 13] {
        let gang = gang(2, prolongs).env(ENV_SIGNAL, &format!("1 {batch} TERM"));
        let left = gang.run_as("own");
        assert_eq!(codes(&left), [79, 79], "{left:?}");
        let gang = gang.again();
        // A signal is heard a little later than it was sent.
        let (name, _) = gang.checkpoint();
        let left_at: u64 = name.split_once('-').unwrap().0.parse().unwrap();
        assert!(left_at >= batch, "{name}");
        let left = gang.run_as("own");
        assert_eq!(codes(&left), [0, 0], "{left:?}");
        assert_eq!(gang.trained(), trained, "asked at {batch}");
        assert_eq!(losses(&gang, &[(3, 0), (4, left_at)]), losses_straight, "asked at {batch}");
    }
}

#[test]
fn a_gang_whose_rank_is_killed_goes_on_from_its_last_checkpoint_to_the_same_bits() {
    let (trained, losses_straight) = straight(2);
    for rank in [0, 1] {
        let gang = gang(2, prolongs).env(ENV_SIGNAL, &format!("{rank} 8 KILL"));
        let left = gang.run_as("own");
        assert!(codes(&left).iter().all(|it| *it != 0), "{left:?}");
        let gang = gang.again();
        let left = gang.run_as("own");
        assert_eq!(codes(&left), [0, 0], "{left:?}");
        assert_eq!(gang.trained(), trained, "rank {rank}");
        assert_eq!(losses(&gang, &[(3, 0), (4, 5)]), losses_straight, "rank {rank}");
    }
}

/// Nothing is collective in this mode: a rank hears of it with the heartbeats.
#[test]
fn ranks_that_ask_for_themselves_hear_of_what_the_runner_asks_rank_0() {
    let answer = |report: &Report| match report.batches {
        0..6 => Directive::Continue { units: 100_000 },
        _ => Directive::Preempt,
    };
    let mut gang = gang(2, answer).env(ENV_THEMSELVES, "1").env(ENV_PACE, "0 5");
    gang.pods.iter_mut().for_each(|it| it.config["units"] = json!(100_000));
    let left = gang.run_as("own");
    // The sums of a rank that has left cannot be had: the other may end with that.
    let codes = codes(&left);
    assert!(codes[0] == 79 && [79, 81].contains(&codes[1]), "{left:?}");
}

#[test]
fn a_signal_has_a_pod_tell_what_its_threads_do_and_ends_nothing() {
    let pod = Pod::new().env(ENV_PACE, "0 100");
    let out = pod.file("").display().to_string();
    let door = crate::door::Door::open(prolongs);
    let mut pod = pod.env(ENV_OUT, &out);
    std::fs::write(pod.file("token"), "one").unwrap();
    pod.config["door"]["url"] = json!(door.url);
    pod.config["units"] = json!(12);
    let child = crate::gang::start_as(&pod, "own");
    until("a first report", || door.reports.lock().unwrap().iter().any(|it| it.batches > 1));
    let launcher = rustix::process::Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    rustix::process::kill_process(launcher, Signal::USR1).unwrap();
    let left = pod.wait(child);
    assert_eq!(left.code, 0, "{left:?}");
    let text = format!("{}{}", left.out, left.errors);
    assert!(text.contains("stoker: rank 0, process "), "{text}");
    assert!(text.contains(", has reported batch "), "{text}");
    assert!(text.contains(" stoker-backgrou "), "{text}");
}
