//! Resumes with the same ID, and warm starts with another.

use super::*;

/// Epochs that began, and the number of batches at the end.
#[derive(Clone, Default)]
struct Seen(Arc<Mutex<(Vec<u64>, u64)>>);

impl Callback for Seen {
    fn on_epoch_begin(&mut self, epoch: u64, _: &mut Control) -> Result<()> {
        self.0.lock().unwrap().0.push(epoch);
        Ok(())
    }

    fn on_train_end(&mut self, control: &mut Control) -> Result<()> {
        self.0.lock().unwrap().1 = control.batches();
        Ok(())
    }
}

/// Trains epochs of eight batches. Returns the epochs that began, the batches at the end, and the
/// weights.
fn train_as(folder: &Path, id: &str, epochs: u64, stop_at: u64) -> (Vec<u64>, u64, Vec<f32>) {
    let standalone = Standalone { length: None, ..alone(Some(folder), 0) };
    let context = standalone.context().unwrap();
    let seen = Seen::default();
    let (x, y) = samples();
    let fit = Fit::new(Data::arrays((x, y)).unwrap().drop_last())
        .batch_size(12)
        .epochs(epochs)
        .continue_id(id)
        .callbacks(vec![seen.clone().boxed(), StopAt(stop_at, context.stop.clone()).boxed()]);
    let step = |model: &Net, (x, y): Pair| StepOutput::classification(model.forward(x), y);
    let one = Optimizers::one(AdamConfig::new().init(), 1e-2);
    let fitted = context.fit(Net::new(context.device()), one, step, fit);
    let weights = fitted.map_or(vec![], |fitted| {
        let data = fitted.model.output.weight.val().into_data();
        data.iter::<f32>().collect()
    });
    let (epochs, batches) = seen.0.lock().unwrap().clone();
    (epochs, batches, weights)
}

pub(super) fn checkpoints(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder.join("trial/checkpoints")).unwrap();
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name();
    let mut names: Vec<_> = entries.map(|entry| name(entry).into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn same_id_resumes_and_another_warm_starts() {
    let _stream = lock_random_stream();
    let same = tempfile::tempdir().unwrap();
    let (epochs, batches, first) = train_as(same.path(), "a", 1, u64::MAX);
    assert_eq!((epochs, batches), (vec![0], 8));
    let (epochs, batches, second) = train_as(same.path(), "a", 2, u64::MAX);
    assert_eq!((epochs, batches), (vec![1], 16));
    assert_eq!(checkpoints(same.path()), ["000000000008-0", "000000000016-1"]);

    let other = tempfile::tempdir().unwrap();
    assert_eq!(train_as(other.path(), "a", 1, u64::MAX).2, first);
    let (epochs, batches, warm) = train_as(other.path(), "b", 1, u64::MAX);
    assert_eq!((epochs, batches), (vec![0], 8));
    // A warm start takes the weights, the data order of epoch 0, and fresh optimizers.
    let fresh = tempfile::tempdir().unwrap();
    let cold = train_as(fresh.path(), "b", 1, u64::MAX).2;
    assert!(warm != cold && warm != first && warm != second);
    // The trial's record counts all batches.
    assert_eq!(checkpoints(other.path()), ["000000000008-0", "000000000016-1"]);
    let batches: Vec<_> = rows(other.path()).into_iter().map(|(batches, ..)| batches).collect();
    assert_eq!(batches, [4, 8, 12, 16]);
    // After a warm start, resumes work as usual.
    for stop_at in [1, 5] {
        let stopped = tempfile::tempdir().unwrap();
        train_as(stopped.path(), "a", 1, u64::MAX);
        train_as(stopped.path(), "b", 1, stop_at);
        let (_, batches, resumed) = train_as(stopped.path(), "b", 1, u64::MAX);
        assert_eq!((batches, resumed), (8, warm.clone()), "stopped at {stop_at}");
    }
}

#[test]
fn trial_sets_the_continue_id() {
    let _stream = lock_random_stream();
    let folder = tempfile::tempdir().unwrap();
    let train = |id: &str| {
        let hyperparameters = json!({"global_batch_size": 50, "id": id});
        let standalone = Standalone { hyperparameters, ..alone(Some(folder.path()), 2) };
        run_trial::<Tiny>(&standalone.context().unwrap()).unwrap();
        checkpoints(folder.path())
    };
    assert_eq!(train("a"), ["000000000002-0"]);
    assert_eq!(train("a"), ["000000000002-0"]);
    // The two batches of the warm start follow the first two.
    assert_eq!(train("b"), ["000000000002-0", "000000000004-1"]);
}
