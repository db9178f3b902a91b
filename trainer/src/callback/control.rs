//! Requests from callbacks to the training loop.

use super::{CheckpointFiles, Logs};
use crate::Result;
use crate::tensorboard::{Display, Image};

/// Requests from callbacks to the training loop, which applies them after each hook.
#[derive(Debug, Default)]
pub struct Control {
    pub(crate) stop: Option<String>,
    pub(crate) scale: Option<f64>,
    pub(crate) rows: Vec<(String, Logs)>,
    pub(crate) displays: Vec<(String, Display)>,
    pub(crate) keeps_weights: bool,
    pub(crate) batches: u64,
    pub(crate) learning_rate_scale: f64,
    /// Checkpoint files that callbacks have claimed at the start.
    pub(crate) claimed_files: CheckpointFiles,
}

impl Control {
    /// Returns the number of global batches trained so far.
    pub fn batches(&self) -> u64 {
        self.batches
    }

    /// Returns the current factor of the learning rate.
    pub fn learning_rate_scale(&self) -> f64 {
        self.scale.unwrap_or(self.learning_rate_scale)
    }

    /// Stops training after this batch. The last validation becomes the trial's result.
    pub fn stop_training(&mut self, why: impl Into<String>) {
        self.stop.get_or_insert(why.into());
    }

    /// Multiplies the current factor of the learning rate by `factor`. Checkpoints keep the factor.
    pub fn scale_learning_rate(&mut self, factor: f64) {
        self.scale = Some(self.learning_rate_scale() * factor);
    }

    /// Replaces the factor of the learning rate. Checkpoints keep the factor.
    pub fn set_learning_rate_scale(&mut self, scale: f64) {
        self.scale = Some(scale);
    }

    /// Writes a row of metrics at this batch to the trial's metrics and to TensorBoard. The group
    /// can have any name, for example `model`, except `training` and `validation`.
    pub fn report(&mut self, group: &str, metrics: Logs) {
        self.rows.push((group.into(), metrics));
    }

    /// Writes a histogram of these values at this batch to TensorBoard.
    pub fn histogram(&mut self, name: &str, values: Vec<f32>) {
        self.displays.push((name.into(), Display::Histogram(values)));
    }

    /// Writes an image at this batch to TensorBoard. The image is lost if the storage is
    /// unavailable for too long.
    pub fn image(&mut self, name: &str, image: Image) {
        self.displays.push((name.into(), Display::Image(image)));
    }

    /// Writes a text in Markdown at this batch to TensorBoard. The text is lost if the storage is
    /// unavailable for too long.
    pub fn text(&mut self, name: &str, text: impl Into<String>) {
        self.displays.push((name.into(), Display::Text(text.into())));
    }

    /// Keeps a copy of the model's current weights and buffers, and replaces any earlier copy.
    /// Training ends with this copy.
    ///
    /// If a callback stops training, the last checkpoint contains the copy, with the metrics of the
    /// validation at this batch. If training reaches its length, only
    /// [`Fitted::model`](crate::Fitted::model) contains it, because a longer training would
    /// continue from the current weights. Until then, checkpoints contain the copy in addition to
    /// the current weights, and are larger by its size. A trial keeps one copy.
    pub fn keep_weights(&mut self) {
        self.keeps_weights = true;
    }

    /// Claims the name of a checkpoint file.
    ///
    /// # Errors
    ///
    /// Fails if the name is not a plain file name, or if a callback has already claimed it.
    pub(crate) fn claim_file(&mut self, name: &str) -> Result<()> {
        self.claimed_files.add(name, vec![])
    }

    /// Returns whether there is a request that changes training.
    pub(crate) fn has_requests(&self) -> bool {
        self.stop.is_some() || self.scale.is_some() || self.keeps_weights
    }

    /// Takes the requests that change training.
    pub(crate) fn take_requests(&mut self) -> TrainingRequests {
        (self.stop.take(), self.scale.take(), std::mem::take(&mut self.keeps_weights))
    }

    /// Restores requests from [`take_requests`](Self::take_requests).
    pub(crate) fn set_requests(&mut self, requests: TrainingRequests) {
        (self.stop, self.scale, self.keeps_weights) = requests;
    }
}

/// Requests that change training: stop reason, learning rate factor, and whether to keep weights.
pub(crate) type TrainingRequests = (Option<String>, Option<f64>, bool);
