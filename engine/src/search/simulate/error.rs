//! Errors of simulations.

use std::fmt;

/// Reason why a simulation is not possible.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SimulateError {
    /// No curve exists for a trial that the search created.
    NoCurve {
        /// Index of the trial.
        trial: u32,
    },
    /// A metric is needed below the first listed length of a curve.
    NoMetric {
        /// Index of the trial.
        trial: u32,
        /// Length of the result.
        units: u64,
    },
    /// The external searcher gave no answer, or its answer was refused.
    NoAnswer {
        /// Number of the question.
        call: u64,
        /// Reason.
        why: String,
    },
}

impl fmt::Display for SimulateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoCurve { trial } => write!(
                f,
                "no curve for trial {trial}; add lines with its `hyperparameters`, or with `trial: \
                 {trial}` and the `seed` of the simulation"
            ),
            Self::NoMetric { trial, units } => write!(
                f,
                "the curve of trial {trial} has no metric at or below {units} units; add one"
            ),
            Self::NoAnswer { call, why } => {
                write!(f, "the external searcher gave no valid answer to call {call}: {why}")
            }
        }
    }
}

impl std::error::Error for SimulateError {}
