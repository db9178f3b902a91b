//! Test mode: reports each stage of the program that works, and names the stage that fails.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use burn::module::Module;

use super::program::panic_text;
use super::run::Run;
use super::save::RestoreError;
use crate::collective::all_gather_cbor;
use crate::context::Context;
use crate::error::error_from_unwind;
use crate::{Error, Result, record};

/// Stage of test mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TestStage {
    New,
    BuildModel,
    BuildOptimizers,
    BuildTrainingData,
    BuildValidationData,
    FirstBatch,
    Validation,
    Checkpoint,
    Restore,
}

impl fmt::Display for TestStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::New => "creating the trial",
            Self::BuildModel => "build_model",
            Self::BuildOptimizers => "build_optimizers",
            Self::BuildTrainingData => "build_training_data",
            Self::BuildValidationData => "build_validation_data",
            Self::FirstBatch => "the first batch",
            Self::Validation => "validation",
            Self::Checkpoint => "the checkpoint",
            Self::Restore => "the restore",
        })
    }
}

/// Error of a stage in test mode.
#[derive(Debug, thiserror::Error)]
#[error("test: {stage} failed: {source}")]
struct StageFailed {
    stage: TestStage,
    source: Error,
}

impl Context {
    /// Runs a stage of the program. In test mode, prints its duration.
    pub(crate) fn run_stage<T>(
        &self,
        stage: TestStage,
        act: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        if !self.is_test {
            return act();
        }
        let start = Instant::now();
        let done = catch_unwind(AssertUnwindSafe(act))
            .unwrap_or_else(|panic| Err(error_from_unwind(panic, |why| panic_text(self, why))));
        if self.distributed().rank() == 0 && done.is_ok() {
            println!("test: {stage}: {:.1} s", start.elapsed().as_secs_f64());
        }
        done.map_err(|source| StageFailed { stage, source }.into())
    }
}

impl<M: Module + 'static, B: Send + 'static> Run<'_, M, B> {
    /// In test mode, restores the last checkpoint and verifies that the model is unchanged.
    pub(super) fn test_restore(&mut self) -> Result<()> {
        let context = self.context;
        if !context.is_test {
            return Ok(());
        }
        // Rank 0 has saved the checkpoint; all ranks restore it.
        let all =
            all_gather_cbor(context.distributed().collective(), "try", self.io().last_saved())?;
        let Some(last) = all.into_iter().next().flatten() else { return Ok(()) };
        context.run_stage(TestStage::Restore, || {
            let restored = self.io().restore_from(&[last])?;
            let Some((name, _, contents)) = restored.checkpoint else {
                let why = restored.refused.into_iter().map(|(name, why)| format!("{name}: {why}"));
                return Err(why.collect::<Vec<_>>().join("; ").into());
            };
            let written = record::snapshot(&*self.model).into_bytes()?;
            let restored = self.restore_from(&contents, false);
            restored.map_err(|source| RestoreError { name: name.clone(), source })?;
            let read = record::snapshot(&*self.model).into_bytes()?;
            match written == read {
                true => Ok(()),
                false => {
                    Err(format!("checkpoint {name} restored a different model than was saved")
                        .into())
                }
            }
        })
    }
}
