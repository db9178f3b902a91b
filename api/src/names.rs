//! Names of environment variables, files, checkpoints and labels, each written once.

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

/// The name of the checkpoint that `attempt` takes after `batches` global batches. Names sort by
/// batches; two attempts never share one.
///
/// # Examples
///
/// ```
/// assert_eq!(stoker_api::names::checkpoint_name(100, 3), "000000000100-3");
/// ```
pub fn checkpoint_name(batches: u64, attempt: u32) -> String {
    format!("{batches:012}-{attempt}")
}

/// The batches and the attempt in a name that [`checkpoint_name`] wrote; `None` for another name.
pub fn parse_checkpoint_name(name: &str) -> Option<(u64, u32)> {
    let (batches, attempt) = name.split_once('-')?;
    let parsed = (batches.parse().ok()?, attempt.parse().ok()?);
    (checkpoint_name(parsed.0, parsed.1) == name).then_some(parsed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(name: &str, expected: Option<(u64, u32)>) {
        assert_eq!(parse_checkpoint_name(name), expected, "{name}");
    }

    #[test]
    fn checkpoint_names_are_read_back_and_other_names_are_not() {
        check(&checkpoint_name(100, 3), Some((100, 3)));
        check("000000000100-3", Some((100, 3)));
        check("000000000100-03", None);
        check("100-3", None);
        check("manifest.json", None);
        check("../../x", None);
        check("+00000000100-3", None);
    }

    #[test]
    fn names_sort_by_batches() {
        assert!(checkpoint_name(999, 12) < checkpoint_name(1_000, 2));
    }
}
