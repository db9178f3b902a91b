//! Types that cross a process boundary: user input, stored records, and messages between trainer
//! and runner.
//!
//! ```text
//!  user  -- Experiment -->  runner  -- TrialConfig -->  trainer
//!                           record  <--   Report   --   (rank 0)
//!                           (Trial) --  Directive  -->
//! ```
//!
//! The crate makes no decisions and does no I/O. Without the feature `crd` it links no Kubernetes
//! code, which keeps the trainer small. With the feature,
//! [`Experiment`](experiment::Experiment), [`Trial`](trial::Trial) and
//! [`InferenceJob`](inference::InferenceJob) are custom resources with schemas.
//!
//! # Reading order
//!
//! 1. [`experiment`]: the experiment as users write it.
//! 2. [`hyperparameters`]: the search space and its syntax.
//! 3. [`trial`]: the record of one trial: sampled hyperparameters, grants and facts;
//!    [`decisions`]: the recorded decisions of a search.
//! 4. [`inference`]: batch inference jobs.
//! 5. [`contract`]: the protocol between trainer and runner: configuration, reports and directives.
//! 6. [`exit`]: the meaning of a trainer's exit code for its attempt.
//! 7. [`pod`]: pod settings that users may specify; [`quantity`]: their amounts.
//! 8. [`validate`]: validation of experiments and jobs.
//! 9. [`condition`], [`time`], [`number`], [`text`]: building blocks of a status.
//! 10. [`names`]: names of environment variables, files and labels.
//! 11. [`external`]: the protocol between a runner and an external searcher.
//! 12. `crd` (feature `crd`): custom resource definitions generated from these types.

pub mod condition;
pub mod contract;
#[cfg(feature = "crd")]
pub mod crd;
pub mod decisions;
pub mod exit;
pub mod experiment;
pub mod external;
pub mod hyperparameters;
pub mod inference;
pub mod names;
pub mod number;
pub mod packed;
pub mod pod;
pub mod quantity;
pub mod text;
pub mod time;
pub mod trial;
pub mod validate;
