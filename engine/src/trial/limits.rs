//! Limits of restarts.

use stoker_api::exit::ExitClass;

use super::BackOffLimits;

/// Number of infrastructure failures without a new checkpoint at which a trial fails.
pub const INFRASTRUCTURE_ATTEMPTS_MAX: u32 = 10;

/// Limits of restarts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RestartLimits {
    /// Number of restarts after failures of the program. With 5, the sixth failure fails the trial.
    pub max_restarts: u32,
    /// Number of infrastructure failures without a new checkpoint at which the trial fails.
    pub infrastructure_attempts_max: u32,
    /// Back-off before a restart.
    pub back_off: BackOffLimits,
    /// Whether a trial of the experiment [has trained](super::has_trained). Until then, the user's
    /// configuration may be wrong, for example the URL of the storage. From then on, an
    /// infrastructure failure before training begins is an outage, and counts against no limit.
    pub has_trained: bool,
}

impl RestartLimits {
    /// Combines an experiment's `maxRestarts`, [`INFRASTRUCTURE_ATTEMPTS_MAX`] and the runner's
    /// back-off.
    pub fn new(max_restarts: u32, back_off: BackOffLimits, has_trained: bool) -> Self {
        let infrastructure_attempts_max = INFRASTRUCTURE_ATTEMPTS_MAX;
        Self { max_restarts, infrastructure_attempts_max, back_off, has_trained }
    }

    /// Returns the limits for the end of an attempt whose program exited with this class.
    #[must_use]
    pub fn after(self, class: ExitClass) -> Self {
        match class {
            ExitClass::Unrecoverable => Self { max_restarts: 0, ..self },
            _ => self,
        }
    }
}
