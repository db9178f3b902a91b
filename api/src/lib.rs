//! Types that cross a process boundary: what users write, what the record holds, what trainer and runner say to
//! each other.
//!
//! ```text
//!  user  -- Experiment -->  runner  -- TrialConfig -->  trainer
//!                           record  <--   Report   --   (rank 0)
//!                           (Trial) --  Directive  -->
//! ```
//!
//! The crate decides nothing and does no I/O. Without the feature `crd` it links no Kubernetes code, so that the
//! trainer stays small; with it, [`Experiment`](experiment::Experiment) and [`Trial`](trial::Trial) are custom
//! resources with schemas.
//!
//! # Reading order
//!
//! 1. [`experiment`]: what a user writes.
//! 2. [`hyperparameters`]: what may vary, and how it is written.
//! 3. [`trial`]: the record of one trial: its draw, its grants, its facts.
//! 4. [`inference`]: a data set through a trained model.
//! 5. [`contract`]: what a trainer is told, reports and is answered.
//! 6. [`exit`]: what a trainer's exit code means for its attempt.
//! 7. [`pod`]: what a user says of a trial's pods.
//! 8. [`validate`]: which experiments can run, and what is wrong with the others.
//! 9. [`names`]: environment variables, files and labels.
//! 10. [`text`]: texts of bounded size.
//! 11. `crd` (feature `crd`): custom resource definitions, made from these types.

pub mod condition;
pub mod contract;
#[cfg(feature = "crd")]
pub mod crd;
pub mod exit;
pub mod experiment;
pub mod hyperparameters;
pub mod inference;
pub mod names;
pub mod number;
pub mod pod;
pub mod text;
pub mod time;
pub mod trial;
pub mod validate;
