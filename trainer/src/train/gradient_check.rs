//! Detection of losses without gradients, which train nothing.

use crate::Result;

/// Number of consecutive steps without gradients after which a training fails that has learned
/// nothing. Some batches may have a constant loss, for example without targets.
const CONSTANT_STEPS_MAX: u32 = 10;

/// Steps without gradients in this process, until the first one with gradients.
#[derive(Debug, Default)]
pub(super) struct GradientCheck {
    has_learned: bool,
    num_constant: u32,
}

impl GradientCheck {
    /// Takes in a step, which `lacks_gradients` on all ranks or on none. With `is_lead`, prints a
    /// warning at the first step without.
    ///
    /// # Errors
    ///
    /// Fails if the first steps of this process had no gradients.
    pub(super) fn check(&mut self, lacks_gradients: bool, is_lead: bool) -> Result<()> {
        self.has_learned |= !lacks_gradients;
        if self.has_learned {
            return Ok(());
        }
        self.num_constant += 1;
        if self.num_constant == CONSTANT_STEPS_MAX {
            return Err(format!(
                "the loss of the first {CONSTANT_STEPS_MAX} steps has no gradient for any \
                 parameter, so nothing is trained; compute it from the present model, without \
                 `detach`"
            )
            .into());
        }
        if self.num_constant == 1 && is_lead {
            eprintln!(
                "stoker: warning: the loss of the first step has no gradient for any parameter; \
                 {CONSTANT_STEPS_MAX} such steps are an error"
            );
        }
        Ok(())
    }
}
