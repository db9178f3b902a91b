//! Trainings have the same rows and epochs whether metrics are read one batch late or at once.

use super::*;
use crate::Metrics;
use crate::train::custom_loop::NextAction;

/// Ends training after batch 9, the first of a workload.
struct Ends {
    wants: bool,
    ended: StopSignal,
}

impl Callback for Ends {
    fn wants_batch_logs(&self) -> bool {
        self.wants
    }

    fn on_batch_end(&mut self, _: &Logs, control: &mut Control) -> Result<()> {
        if control.batches() == 9 {
            self.ended.set();
        }
        Ok(())
    }
}

/// Rows of metrics: batch, group and values.
type Rows = Vec<(u64, String, Value)>;

/// An epoch is 7 batches, a workload 4. Returns the rows and epochs, with metrics that are read
/// late and at once.
fn trained(
    train: impl Fn(&Context, Optimizers, Fit<Pair>) -> Fitted<Net>,
) -> [(Rows, Vec<Logs>); 2] {
    [false, true].map(|wants| {
        let folder = brief_folder();
        let mut context = alone(Some(folder.path()), 20).context().unwrap();
        (context.config.validation_period, context.config.checkpoint_period) = (None, None);
        let ends = Ends { wants, ended: context.ended.clone() };
        let fit =
            Fit::new(Data::arrays(samples()).unwrap()).batch_size(16).callbacks(vec![ends.boxed()]);
        let fitted = train(&context, Optimizers::one(AdamConfig::new().init(), 0.01), fit);
        assert_eq!(fitted.stopped.as_deref(), Some("the program ended training"));
        (rows(folder.path()), fitted.history)
    })
}

fn output(model: &Net, (x, y): Pair) -> StepOutput {
    StepOutput::classification(model.forward(x), y)
}

#[test]
fn late_metrics_complete_rows_and_epochs() {
    let _stream = lock_random_stream();
    let [late, at_once] = trained(|context, adam, fit| {
        context.fit(Net::new(context.device()), adam, output, fit).unwrap()
    });
    let batches: Vec<u64> = late.0.iter().map(|row| row.0).collect();
    assert_eq!((batches, late.1.len()), (vec![4, 8, 9], 1));
    assert_eq!(late, at_once);
}

/// Added to 1, this number remains.
const LARGE: f64 = (1_u64 << 53) as f64;

/// Metrics of batches with `learn` are read late, those of batches with `step` are not.
#[test]
fn late_metrics_of_custom_loops_are_complete() {
    let _stream = lock_random_stream();
    let [late, at_once] = trained(|context, adam, fit| {
        let mut training = context.training(Net::new(context.device()), adam, fit).unwrap();
        while let Some(action) = training.next().unwrap() {
            let NextAction::Train(Some(batch)) = action else {
                training.validated(&Metrics::default()).unwrap();
                continue;
            };
            let number = (training.batches() % 3) as usize;
            // The rounded sum of these numbers depends on their order.
            let output =
                output(&training.model(), batch).metric("order", [1.0, LARGE, -LARGE][number], 1);
            if number < 2 {
                training.learn(Some(output)).unwrap();
            } else {
                training.step("weight", Some(output)).unwrap();
                training.end_batch().unwrap();
            }
        }
        training.finish().unwrap()
    });
    assert_eq!(late.0.len(), 3);
    assert_eq!(late, at_once);
}
