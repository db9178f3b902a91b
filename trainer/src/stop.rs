//! Stop requests from outside the training loop.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};

/// Pause between two checks of the flag by tasks that wait for it.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Flag of the signals of this process, for code without a context.
static OF_PROCESS: LazyLock<StopSignal> = LazyLock::new(StopSignal::default);

/// Flag set once, by a signal or by a holder of a clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct StopSignal(Arc<AtomicBool>);

impl StopSignal {
    /// Returns the flag of the signals that this process has received since its last context was
    /// created.
    pub(crate) fn of_process() -> Self {
        OF_PROCESS.clone()
    }

    /// Requests that the loop saves a checkpoint and exits after the current batch.
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Waits until the flag is set.
    pub(crate) async fn wait(&self) {
        while !self.is_set() {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Sets this flag on SIGTERM and, without a runner, on SIGINT. A terminal sends SIGINT to all
    /// of its processes: under a runner, the runner handles SIGINT and this process ignores it.
    /// SIGINT also stays ignored if this process was started that way, for example in the
    /// background of a script.
    ///
    /// # Errors
    ///
    /// Fails if the handlers cannot be installed.
    pub(crate) fn listen(
        &self,
        rt: &tokio::runtime::Handle,
        standalone: bool,
    ) -> std::io::Result<()> {
        let _guard = rt.enter();
        OF_PROCESS.0.store(false, Ordering::Relaxed);
        let may_interrupt = !is_ignored(Signal::INT);
        let mut terminate = signal(SignalKind::terminate())?;
        let (term, int) = (self.clone(), self.clone());
        rt.spawn(async move {
            while terminate.recv().await.is_some() {
                term.set();
                OF_PROCESS.set();
            }
        });
        if !may_interrupt {
            return Ok(());
        }
        let mut interrupt = signal(SignalKind::interrupt())?;
        rt.spawn(async move {
            while interrupt.recv().await.is_some() {
                if standalone && int.is_set() {
                    // Second Ctrl-C: exit without waiting for the save.
                    std::process::exit(130);
                }
                if standalone {
                    int.set();
                    OF_PROCESS.set();
                }
            }
        });
        Ok(())
    }
}

/// Returns whether this process ignores a signal, which it may have inherited from `nohup` or a
/// shell. Must be called before a handler is installed.
pub(crate) fn is_ignored(signal: Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & (1 << (signal.as_raw() - 1)) != 0)
}
