//! Batches that a program makes itself, by their number.

use super::{At, Source};
use crate::Result;

/// Batches in any order, as Keras's `Sequence` gives them: each is the share of one rank in one step.
///
/// # Examples
///
/// ```
/// use stoker_trainer::{At, Data, Result, Sequence};
///
/// struct Squares;
///
/// impl Sequence<Vec<u64>> for Squares {
///     fn batches(&self) -> usize {
///         10
///     }
///
///     fn batch(&self, index: usize, at: &At) -> Result<Vec<u64>> {
///         let first = index as u64 * 32;
///         Ok((first..first + 32).map(|it| it * it + at.epoch).collect())
///     }
/// }
///
/// assert_eq!(Data::sequence(Squares).samples(), 10);
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no sequence of batches of type `{B}`",
    note = "implement `Sequence<{B}>`; for single samples implement `Source<{B}>`"
)]
pub trait Sequence<B>: Send + Sync {
    /// Batches of an epoch, over all ranks.
    fn batches(&self) -> usize;

    /// Makes batch `index`, of as many samples as one rank is to have in a step. Called by several
    /// threads at once and in any order; must depend on nothing but its arguments. What is to change
    /// between epochs goes by [`At::epoch`]: batches are made ahead of time, and after a restart from
    /// anywhere, so that nothing is told of an epoch's end.
    ///
    /// # Errors
    ///
    /// Whatever should end the trial.
    fn batch(&self, index: usize, at: &At) -> Result<B>;
}

/// A sequence whose samples are its batches.
pub(super) struct Batches<S>(pub(super) S);

impl<B, S: Sequence<B>> Source<B> for Batches<S> {
    fn samples(&self) -> usize {
        self.0.batches()
    }

    fn batch(&self, samples: &[usize], at: &At) -> Result<B> {
        match samples {
            [index] => self.0.batch(*index, at),
            _ => Err(format!("a rank takes one batch of a sequence, not {}", samples.len()).into()),
        }
    }

    fn is_batched(&self) -> bool {
        true
    }
}
