//! Validation of experiments that have started.

use stoker_api::experiment::{ExperimentSpec, ExperimentStatus};
use stoker_api::validate::{FieldError, ValidExperiment, validate_started, with_settings};

use super::recorded_settings;

/// Validates an experiment that has started. If its last edit made it invalid, the experiment has
/// the settings that its search has recorded.
///
/// # Errors
///
/// All field errors of an experiment that is also invalid with the recorded settings.
pub fn validate_recorded(
    name: &str,
    spec: &ExperimentSpec,
    status: Option<&ExperimentStatus>,
) -> Result<ValidExperiment, Vec<FieldError>> {
    validate_started(name, spec).or_else(|errors| without_edit(name, spec, status).ok_or(errors))
}

/// Returns an experiment that was valid before its last edit, with the settings that its search has
/// recorded; `None` if it is invalid with them too. Otherwise, such an edit would stop all trials.
pub fn without_edit(
    name: &str,
    spec: &ExperimentSpec,
    status: Option<&ExperimentStatus>,
) -> Option<ValidExperiment> {
    let recorded = recorded_settings(&status?.log)?;
    let searcher = with_settings(&spec.searcher, recorded);
    let spec = ExperimentSpec { searcher, ..spec.clone() };
    validate_started(name, &spec).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn invalid_edit_leaves_recorded_settings() {
        let event = json!({ "began": { "version": "1", "settings": {
            "maxTrials": 2, "maxConcurrentTrials": 16, "maxLength": 9, "releaseSeconds": 60,
        }}});
        let entry = json!({ "order": 0, "at": "2026-01-01T00:00:00Z", "event": event });
        let status = ExperimentStatus {
            log: serde_json::from_value(json!([entry])).unwrap(),
            ..ExperimentStatus::default()
        };
        let length = |max_length: u64, status| {
            let spec = json!({ "entrypoint": { "command": ["train"] }, "searcher": {
                "metric": "loss", "maxLength": { "epochs": max_length },
                "random": { "maxTrials": 2 }, "medianStopping": { "everyUnits": 1 },
            }});
            let spec: ExperimentSpec = serde_json::from_value(spec).unwrap();
            validate_recorded("e", &spec, status).map(|valid| valid.units_max).ok()
        };
        assert_eq!(length(128, Some(&status)), Some(128));
        assert_eq!(length(129, Some(&status)), Some(9));
        assert_eq!(length(129, None), None);
    }
}
