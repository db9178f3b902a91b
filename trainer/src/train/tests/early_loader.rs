//! Batches that are prepared before the position in the data is certain.

use std::sync::mpsc;
use std::time::Duration;

use super::warm_starts::checkpoints;
use super::*;
use crate::{BatchContext, CheckpointFiles, Source};

/// Epoch and samples of a batch.
type Announcement = (u64, Vec<usize>);

/// Rows of [`samples`]. Each batch is announced when it is made.
struct Announced(Pair, mpsc::Sender<Announcement>);

impl Source<Pair> for Announced {
    fn samples(&self) -> usize {
        SAMPLES as usize
    }

    fn batch(&self, samples: &[usize], context: &BatchContext) -> Result<Pair> {
        self.1.send((context.epoch, samples.to_vec()))?;
        let rows: Vec<i64> = samples.iter().map(|sample| *sample as i64).collect();
        let rows = Tensor::from_data(rows.as_slice(), context.device);
        let (x, y) = self.0.clone();
        Ok((x.select(0, rows.clone()), y.select(0, rows)))
    }
}

/// Waits in the restore until a batch was announced, and keeps the announcement.
struct WaitsForBatch(Arc<Mutex<mpsc::Receiver<Announcement>>>, Arc<Mutex<Option<Announcement>>>);

impl Callback for WaitsForBatch {
    fn on_restore(&mut self, _: &CheckpointFiles) -> Result<()> {
        let announced = self.0.lock().unwrap().recv_timeout(Duration::from_secs(60));
        *self.1.lock().unwrap() = Some(announced?);
        Ok(())
    }
}

/// Outcome of a training.
struct Trained {
    fitted: Result<Fitted<Net>>,
    /// First batch that was made during the restore.
    early: Option<Announcement>,
    /// Batches that were made after that.
    later: Vec<Announcement>,
}

impl Trained {
    fn model(self) -> Vec<u8> {
        crate::record::snapshot(&self.fitted.unwrap().model).into_bytes().unwrap().to_vec()
    }
}

/// Trains two epochs of seven batches, or stops after batch `stop_at`. Saves after each second
/// batch.
fn train(folder: &Path, (id, workers): (&str, usize), stop_at: u64) -> Trained {
    let standalone = Standalone { length: None, ..alone(Some(folder), 0) };
    let checkpoint_period = Some(Length::new(Unit::Batches, 2));
    let context = Standalone { checkpoint_period, ..standalone }.context().unwrap();
    let (announce, announced) = mpsc::channel();
    let (announced, early) = (Arc::new(Mutex::new(announced)), Arc::new(Mutex::new(None)));
    let mut callbacks = vec![StopAt(stop_at, context.stop.clone()).boxed()];
    if workers > 0 {
        callbacks.push(WaitsForBatch(announced.clone(), early.clone()).boxed());
    }
    let fit = Fit::new(Data::new(Announced(samples(), announce)).workers(workers).queue(3))
        .batch_size(16)
        .epochs(2)
        .continue_id(id)
        .callbacks(callbacks);
    let step = |model: &Net, (x, y): Pair| StepOutput::classification(model.forward(x), y);
    let fitted = context.fit(Net::new(context.device()), optimizers(), step, fit);
    let (early, later) = (early.lock().unwrap().take(), announced.lock().unwrap().iter().collect());
    Trained { fitted, early, later }
}

/// Trains without workers, and stops after batch `stop_at`.
fn stop(folder: &Path, id: &str, stop_at: u64) {
    let error = train(folder, (id, 0), stop_at).fitted.unwrap_err();
    assert_eq!(exit_code(&*error), ExitCode::Preempted, "{error}");
}

#[test]
fn first_batches_are_prepared_during_the_restore() {
    let _stream = lock_random_stream();
    let straight = brief_folder();
    let expected = train(straight.path(), ("", 0), u64::MAX).model();
    // The last stop is in the second epoch.
    for (stop_at, epoch) in [(3, 0), (9, 1)] {
        let folder = brief_folder();
        stop(folder.path(), "", stop_at);
        let trained = train(folder.path(), ("", 1), u64::MAX);
        let early = trained.early.clone().unwrap();
        assert_eq!(early.0, epoch, "stopped at {stop_at}");
        assert!(!trained.later.contains(&early), "stopped at {stop_at}: made again");
        assert!(trained.model() == expected, "stopped at {stop_at}");
    }
}

/// The training resumes or starts in the first epoch, but the last checkpoint ends in the second.
#[test]
fn wrong_guesses_of_the_position_change_nothing() {
    let _stream = lock_random_stream();
    let check = |what: &str, last: &str, prepare: &dyn Fn(&Path)| {
        let [without, with] = [0, 2].map(|workers| {
            let folder = brief_folder();
            prepare(folder.path());
            assert_eq!(checkpoints(folder.path()).last().unwrap(), last, "{what}");
            train(folder.path(), ("", workers), u64::MAX)
        });
        let early = with.early.as_ref().map(|(epoch, _)| *epoch);
        assert!(without.later[0].0 == 0 && with.later.iter().any(|(epoch, _)| *epoch == 0));
        assert!(with.model() == without.model(), "{what}");
        early
    };
    let damaged = check("the last checkpoint is damaged", "000000000007-0", &|folder| {
        stop(folder, "", 7);
        let file = folder.join("trial/checkpoints/000000000007-0/model.bpk");
        assert!(file.exists());
        std::fs::write(file, "damaged").unwrap();
    });
    assert_eq!(damaged, Some(1));
    let after = check("the training resumes after a warm start", "000000000009-1", &|folder| {
        stop(folder, "another", 4);
        stop(folder, "", 5);
    });
    assert_eq!(after, Some(1));
    // Callbacks have nothing to restore.
    let other = check("the checkpoint is of another training", "000000000009-0", &|folder| {
        stop(folder, "another", 9);
    });
    assert_eq!(other, None);
}
