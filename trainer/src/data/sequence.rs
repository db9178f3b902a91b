//! Batches that the program makes by index.

use super::{BatchContext, Source};
use crate::Result;

/// Batches with random access, like Keras's `Sequence`. Each batch is the share of one rank in one
/// step.
///
/// # Examples
///
/// ```
/// use stoker_trainer::{BatchContext, Data, Result, Sequence};
///
/// struct Squares;
///
/// impl Sequence<Vec<u64>> for Squares {
///     fn batches(&self) -> usize {
///         10
///     }
///
///     fn batch(&self, index: usize, context: &BatchContext) -> Result<Vec<u64>> {
///         let first = index as u64 * 32;
///         Ok((first..first + 32).map(|number| number * number + context.epoch).collect())
///     }
/// }
///
/// assert_eq!(Data::sequence(Squares).samples(), 10);
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a sequence of batches of type `{B}`",
    note = "implement `Sequence<{B}>`; for single samples implement `Source<{B}>`"
)]
pub trait Sequence<B>: Send + Sync {
    /// Returns the number of batches in an epoch, over all ranks.
    fn batches(&self) -> usize;

    /// Makes batch `index` with the number of samples that one rank processes in a step. Several
    /// threads call this concurrently and in any order; the result must depend only on the
    /// arguments.
    ///
    /// Use [`BatchContext::epoch`] for anything that changes between epochs. There is no callback
    /// at the end of an epoch, because batches are made in advance and training may resume at any
    /// batch.
    ///
    /// # Errors
    ///
    /// Any error; it ends the trial.
    fn batch(&self, index: usize, context: &BatchContext) -> Result<B>;
}

/// A sequence as a source whose samples are complete batches.
pub(super) struct SequenceBatches<S>(pub(super) S);

impl<B, S: Sequence<B>> Source<B> for SequenceBatches<S> {
    fn samples(&self) -> usize {
        self.0.batches()
    }

    fn batch(&self, samples: &[usize], context: &BatchContext) -> Result<B> {
        match samples {
            [index] => self.0.batch(*index, context),
            _ => {
                let num = samples.len();
                Err(format!("a rank takes one batch of a sequence per step, not {num}").into())
            }
        }
    }

    fn is_batched(&self) -> bool {
        true
    }
}
