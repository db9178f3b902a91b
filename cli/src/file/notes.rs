//! Notes on searches that are valid, but cannot do what their method is for.

use stoker_api::validate::Method;

/// Returns the note on a search, if there is one.
pub(super) fn note(method: &Method) -> Option<String> {
    match method {
        Method::AsyncHalving(search) => {
            let num_required = search.divisor.saturating_pow(search.num_rungs.saturating_sub(1));
            // With `stopOnce`, the best trial of a rung always continues.
            let is_short = !search.stop_once && search.max_trials < num_required;
            is_short.then(|| {
                format!(
                    "note: asyncHalving.maxTrials is {}, so few or no trials are promoted to \
                     maxLength; use {num_required} trials or more, or fewer rungs than {}",
                    search.max_trials, search.num_rungs
                )
            })
        }
        Method::Pbt { search, .. } => {
            let num_copies = search.truncate_fraction * f64::from(search.population_size);
            let is_without = search.num_rounds > 1 && num_copies < 1.0;
            is_without.then(|| {
                format!(
                    "note: pbt.truncateFraction of {} is less than one of {} trials, so no trial \
                     is replaced by a copy; raise it, or pbt.populationSize",
                    search.truncate_fraction, search.population_size
                )
            })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::file::parse;

    /// Returns the note on a search of 64 epochs.
    fn note_on(method: &str, fields: Value) -> Option<String> {
        let spec = json!({
            "entrypoint": { "command": ["train"] },
            "searcher": { "metric": "loss", "maxLength": { "epochs": 64 }, method: fields },
        });
        let file = json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "Experiment",
            "metadata": { "name": "a" }, "spec": spec,
        });
        parse(&file.to_string(), "a", &[]).unwrap().notes.pop()
    }

    #[test]
    fn too_few_trials_for_the_last_rung_are_noted() {
        let note = |max_trials: u32, stop_once: bool| {
            let halving = json!({
                "maxTrials": max_trials, "numRungs": 4, "divisor": 4, "stopOnce": stop_once,
            });
            note_on("asyncHalving", halving)
        };
        assert!(note(63, false).unwrap().contains("use 64 trials or more"));
        assert_eq!(note(64, false), None);
        assert_eq!(note(1, true), None);
        assert_eq!(note_on("single", json!({})), None);
    }

    #[test]
    fn population_without_copies_is_noted() {
        let note = |population_size: u32, num_rounds: u32| {
            let length = json!({ "epochs": 64 / num_rounds });
            let pbt = json!({
                "populationSize": population_size, "numRounds": num_rounds,
                "lengthPerRound": length,
            });
            note_on("pbt", pbt)
        };
        assert!(note(4, 2).unwrap().contains("truncateFraction of 0.2 is less than one of 4"));
        assert_eq!(note(5, 2), None);
        assert_eq!(note(4, 1), None);
    }
}
