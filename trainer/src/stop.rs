//! A wish from outside the loop to leave it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::signal::unix::{SignalKind, signal};

/// Set once, by a signal or by whoever holds a clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct StopSignal(Arc<AtomicBool>);

impl StopSignal {
    /// Asks the loop to save and leave after its batch.
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Sets this at SIGTERM. SIGINT goes to a whole terminal's processes: under a runner it is the
    /// runner's to act on, and ignored here.
    ///
    /// # Errors
    ///
    /// The handlers could not be installed.
    pub(crate) fn listen(&self, rt: &tokio::runtime::Handle, alone: bool) -> std::io::Result<()> {
        let _guard = rt.enter();
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let (term, int) = (self.clone(), self.clone());
        rt.spawn(async move {
            while terminate.recv().await.is_some() {
                term.set();
            }
        });
        rt.spawn(async move {
            while interrupt.recv().await.is_some() {
                if alone && int.is_set() {
                    // Asked twice, by a person: the save is not waited for.
                    std::process::exit(130);
                }
                if alone {
                    int.set();
                }
            }
        });
        Ok(())
    }
}
