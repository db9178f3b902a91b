//! Steps of a custom loop that update a part of the model.

use burn::module::Module;

use super::{Stage, Training, out_of_order};
use crate::optim::{GradientSum, Selection};
use crate::step::{Metrics, StepOutput};
use crate::{Result, record};

impl<M: Module + 'static, B: Send + 'static> Training<'_, M, B> {
    /// Changes the values of the model outside of a step, for example of a frozen target network
    /// with [`blend`](crate::blend). Call this before [`learn`](Self::learn) or
    /// [`end_batch`](Self::end_batch), because a checkpoint may be saved there. If it changes
    /// trained parameters, compute the loss afterwards: an earlier loss has no gradients for the
    /// new values. All ranks must make the same change.
    ///
    /// # Errors
    ///
    /// Fails if the current action is not `NextAction::Train`, if `update` fails, or if it returns
    /// a model with other parameters. The training cannot continue after the latter two.
    pub fn update_model(&mut self, update: impl FnOnce(M) -> Result<M>) -> Result<()> {
        if !matches!(self.stage, Stage::Train | Stage::Stepped) {
            return Err(out_of_order("update_model", "after `NextAction::Train`", self.stage));
        }
        let model = &mut self.run.model;
        let before = record::parameter_ids(&**model);
        model.replace(update)?;
        if record::parameter_ids(&**model) != before {
            return Err("update_model has replaced parameters by others, which the optimizers do \
                        not know; change only their values, for example with `blend`"
                .into());
        }
        Ok(())
    }

    /// Takes one step of a batch with only these parameters, which the expression `of` matches.
    pub(super) fn step_selected(
        &mut self,
        of: &str,
        selection: &Selection,
        output: Option<StepOutput>,
    ) -> Result<Metrics> {
        let run = &mut self.run;
        if run.aggregation > 1 {
            let text = format!(
                "cannot step with some of the parameters: gradients are aggregated over {} \
                 batches; set optimizations.aggregationFrequency to 1 or use `learn`",
                run.aggregation
            );
            return Err(text.into());
        }
        let ranks = run.context.distributed();
        let mut sum = GradientSum::default();
        let metrics = sum.add_selected(&*run.model, selection, output, ranks.size() == 1);
        // Ranks must agree on the step: mismatched sums would be silently wrong.
        let position = format!("step of {selection} of batch {}", run.state.batches);
        let (metrics, sum) = run.exchange_step(&position, metrics, Some(sum))?;
        let sum = sum.unwrap_or_default();
        if sum.lacks_gradients() {
            return Err(format!(
                "step of {of:?}: the loss has no gradient for these parameters; compute it from \
                 `Training::model`, after the previous step of the batch"
            )
            .into());
        }
        self.warn_of_earlier_steps(of, selection, &sum);
        self.updated.extend(sum.indices());
        let run = &mut self.run;
        let gradients = run.optimizers.normalize(&*run.model, sum, ranks.collective())?;
        let (optimizers, rates) = (&mut run.optimizers, &mut run.rates);
        let rates = rates.get_or_insert_with(|| optimizers.next_rates());
        run.model.replace(|model| optimizers.step_at(rates, model, gradients))?;
        Ok(metrics.read())
    }

    /// Prints a warning if an earlier step of this batch has updated selected parameters without a
    /// gradient. A step replaces its parameters, so a loss that was computed before has none for
    /// them. A loss that does not depend on them has none either, so this is not an error.
    fn warn_of_earlier_steps(&mut self, of: &str, selection: &Selection, sum: &GradientSum) {
        let with_gradient = sum.indices().collect();
        let mut without = self.updated.difference(&with_gradient);
        let Some(index) = without.find(|index| selection.has(**index)) else { return };
        if !std::mem::replace(&mut self.has_warned, true)
            && self.run.context.distributed().rank() == 0
        {
            eprintln!("stoker: {}", warning(of, &record::trained_paths(&*self.run.model)[*index]));
        }
    }

    /// Ends the steps of this batch.
    pub(super) fn end_steps(&mut self) {
        self.run.rates = None;
        self.updated.clear();
    }
}

fn warning(of: &str, path: &str) -> String {
    format!(
        "step of {of:?}: the loss has no gradient for {path}, which an earlier step of the batch \
         has updated; compute the loss from `Training::model` after that step, or select only \
         parameters that the loss depends on"
    )
}
