//! Background thread for saves and reports.

use std::thread::JoinHandle;

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

use crate::Result;
use crate::error::Infrastructure;

/// Thread with a runtime for saves and reports, separate from the training loop. Dropping it
/// cancels unfinished tasks and joins the thread.
#[derive(Debug)]
pub(super) struct Background {
    pub(super) handle: Handle,
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Background {
    pub(super) fn start() -> Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| {
            Infrastructure(format!("cannot start the background runtime: {error}"))
        })?;
        let (handle, (end, ended)) = (runtime.handle().clone(), oneshot::channel());
        let thread = std::thread::Builder::new().name("stoker-background".into());
        let thread = thread.spawn(move || {
            let _ = runtime.block_on(ended);
        });
        let thread = thread.map_err(|error| {
            Infrastructure(format!("cannot start the background thread: {error}"))
        })?;
        Ok(Self { handle, end: Some(end), thread: Some(thread) })
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        drop(self.end.take());
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
