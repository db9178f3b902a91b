//! Names of environment variables, files and labels, each written once.

/// API group of all custom resources.
pub const GROUP: &str = "stoker.dev";
/// Version of all custom resources.
pub const VERSION: &str = "v1alpha1";
/// `apiVersion` of all custom resources.
pub const API_VERSION: &str = "stoker.dev/v1alpha1";

/// Path of the JSON file that holds the [`TrialConfig`](crate::contract::TrialConfig). Unset: the program trains alone.
pub const ENV_TRIAL_CONFIG: &str = "STOKER_TRIAL_CONFIG";
/// Folder where results that outlive the process but not the machine are kept, such as downloaded data sets.
pub const ENV_CACHE: &str = "STOKER_CACHE";

/// The manifest's name in a checkpoint's folder. A checkpoint exists when it does.
pub const MANIFEST: &str = "manifest.json";
/// The file that carries a trial's record beside its checkpoints.
pub const RECORD: &str = "record.json";
