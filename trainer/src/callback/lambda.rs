//! Callback made of closures.

use std::fmt;

use super::{Callback, Control, Logs};
use crate::Result;

type OnControl = Box<dyn FnMut(&mut Control) -> Result<()> + Send>;
type OnEpoch = Box<dyn FnMut(u64, &mut Control) -> Result<()> + Send>;
type OnLogs = Box<dyn FnMut(&Logs, &mut Control) -> Result<()> + Send>;
type OnEpochLogs = Box<dyn FnMut(u64, &Logs, &mut Control) -> Result<()> + Send>;

/// Callback made of closures. It stores no state in checkpoints.
#[derive(Default)]
pub struct Lambda {
    name: Option<String>,
    train_begin: Option<OnControl>,
    epoch_begin: Option<OnEpoch>,
    batch_end: Option<OnLogs>,
    validation_end: Option<OnLogs>,
    epoch_end: Option<OnEpochLogs>,
    train_end: Option<OnControl>,
}

impl fmt::Debug for Lambda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lambda").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Lambda {
    /// Creates a callback without closures.
    pub fn new(name: &str) -> Self {
        Self { name: Some(name.into()), ..Self::default() }
    }

    /// Calls `hook` at [`Callback::on_train_begin`].
    #[must_use]
    pub fn train_begin(
        self,
        hook: impl FnMut(&mut Control) -> Result<()> + Send + 'static,
    ) -> Self {
        Self { train_begin: Some(Box::new(hook)), ..self }
    }

    /// Calls `hook` at [`Callback::on_epoch_begin`].
    #[must_use]
    pub fn epoch_begin(
        self,
        hook: impl FnMut(u64, &mut Control) -> Result<()> + Send + 'static,
    ) -> Self {
        Self { epoch_begin: Some(Box::new(hook)), ..self }
    }

    /// Calls `hook` at [`Callback::on_batch_end`], with the logs of the batch. The training loop
    /// then waits for a GPU in each batch; see [`Callback::wants_batch_logs`]. For a hook that does
    /// not use the logs, implement [`Callback`].
    #[must_use]
    pub fn batch_end(
        self,
        hook: impl FnMut(&Logs, &mut Control) -> Result<()> + Send + 'static,
    ) -> Self {
        Self { batch_end: Some(Box::new(hook)), ..self }
    }

    /// Calls `hook` at [`Callback::on_validation_end`].
    #[must_use]
    pub fn validation_end(
        self,
        hook: impl FnMut(&Logs, &mut Control) -> Result<()> + Send + 'static,
    ) -> Self {
        Self { validation_end: Some(Box::new(hook)), ..self }
    }

    /// Calls `hook` at [`Callback::on_epoch_end`].
    #[must_use]
    pub fn epoch_end(
        self,
        hook: impl FnMut(u64, &Logs, &mut Control) -> Result<()> + Send + 'static,
    ) -> Self {
        Self { epoch_end: Some(Box::new(hook)), ..self }
    }

    /// Calls `hook` at [`Callback::on_train_end`].
    #[must_use]
    pub fn train_end(self, hook: impl FnMut(&mut Control) -> Result<()> + Send + 'static) -> Self {
        Self { train_end: Some(Box::new(hook)), ..self }
    }
}

impl Callback for Lambda {
    fn name(&self) -> String {
        self.name.clone().unwrap_or_else(|| "Lambda".into())
    }

    fn on_train_begin(&mut self, control: &mut Control) -> Result<()> {
        self.train_begin.as_mut().map_or(Ok(()), |hook| hook(control))
    }

    fn on_epoch_begin(&mut self, epoch: u64, control: &mut Control) -> Result<()> {
        self.epoch_begin.as_mut().map_or(Ok(()), |hook| hook(epoch, control))
    }

    fn wants_batch_logs(&self) -> bool {
        self.batch_end.is_some()
    }

    fn on_batch_end(&mut self, logs: &Logs, control: &mut Control) -> Result<()> {
        self.batch_end.as_mut().map_or(Ok(()), |hook| hook(logs, control))
    }

    fn on_validation_end(&mut self, logs: &Logs, control: &mut Control) -> Result<()> {
        self.validation_end.as_mut().map_or(Ok(()), |hook| hook(logs, control))
    }

    fn on_epoch_end(&mut self, epoch: u64, logs: &Logs, control: &mut Control) -> Result<()> {
        self.epoch_end.as_mut().map_or(Ok(()), |hook| hook(epoch, logs, control))
    }

    fn on_train_end(&mut self, control: &mut Control) -> Result<()> {
        self.train_end.as_mut().map_or(Ok(()), |hook| hook(control))
    }
}
