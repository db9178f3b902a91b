//! Data for TensorBoard beyond the scalars that every run writes.

use super::{Callback, Control, Logs, Weights};
use crate::Result;

/// Writes histograms of weights and the number of model parameters for TensorBoard.
///
/// Scalars of training and validation need no callback. Files are stored in the trial's directory
/// `tensorboard/`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorBoard {
    histogram_period: u64,
}

impl Default for TensorBoard {
    fn default() -> Self {
        Self { histogram_period: 1 }
    }
}

impl TensorBoard {
    /// Writes histograms after each epoch.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the number of epochs between histograms (default: 1). With 0, writes none.
    #[must_use]
    pub fn histogram_period(self, epochs: u64) -> Self {
        Self { histogram_period: epochs }
    }

    fn is_due(&self, epoch: u64) -> bool {
        self.histogram_period > 0 && (epoch + 1).is_multiple_of(self.histogram_period)
    }
}

impl Callback for TensorBoard {
    fn chief_only(&self) -> bool {
        true
    }

    fn wants_batch_logs(&self) -> bool {
        false
    }

    fn wants_weights(&self, epoch: u64) -> bool {
        epoch == 0 || self.is_due(epoch)
    }

    fn on_weights(&mut self, epoch: u64, weights: &Weights, control: &mut Control) -> Result<()> {
        if epoch == 0 {
            let count = Logs::from([("num_parameters".into(), weights.num_trained() as f64)]);
            control.report("model", count);
        }
        if self.is_due(epoch) {
            for (path, values) in weights.iter() {
                control.histogram(path, values.to_vec());
            }
        }
        Ok(())
    }
}
