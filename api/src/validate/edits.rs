//! Edits of an experiment that has started.

use serde_json::json;

use super::FieldError;
use crate::decisions::SearchSettings;
use crate::experiment::{Length, Searcher};

/// Returns `recorded` with all fields of `given` that may be edited: `maxTrials` and `maxLength` of
/// searches whose rungs can grow, `maxConcurrentTrials`, `limits` and `releaseSeconds`.
pub fn with_edits(recorded: &Searcher, given: &Searcher) -> Searcher {
    let mut edited = recorded.clone();
    edited.limits = given.limits;
    edited.release_seconds = given.release_seconds;
    if let (Some(edited), Some(given)) = (max_trials_mut(&mut edited), max_trials(given)) {
        *edited = given;
    }
    if let (Some(edited), Some(given)) = (concurrency_mut(&mut edited), concurrency(given)) {
        *edited = given;
    }
    if !has_fixed_rungs(&edited) {
        edited.max_length = given.max_length;
    }
    edited
}

/// Returns `given` with the recorded values of all fields that may be edited.
pub fn with_settings(given: &Searcher, recorded: &SearchSettings) -> Searcher {
    let mut searcher = given.clone();
    searcher.limits = Some(recorded.limits).filter(|limits| limits.all().next().is_some());
    searcher.release_seconds = recorded.release_seconds;
    if let (Some(number), Some(value)) = (max_trials_mut(&mut searcher), recorded.max_trials) {
        *number = value;
    }
    let max_concurrent = recorded.max_concurrent_trials;
    if let (Some(number), Some(value)) = (concurrency_mut(&mut searcher), max_concurrent) {
        *number = value;
    }
    if let (false, Some((unit, _))) = (has_fixed_rungs(&searcher), searcher.max_length.get()) {
        searcher.max_length = Length::new(unit, recorded.max_length);
    }
    searcher
}

/// Checks the values of edited fields.
///
/// # Errors
///
/// All values that the experiment cannot have any more.
pub fn check_edit(
    recorded: &Searcher,
    given: &Searcher,
    trials_created: u32,
) -> Result<(), Vec<FieldError>> {
    let mut errors = vec![];
    let before = max_trials(recorded);
    errors.extend(before.and_then(|before| check_max_trials(given, before, trials_created)));
    let lengths = recorded.max_length.get().zip(given.max_length.get());
    if let Some(((unit, before), (given_unit, after))) = lengths
        && (unit != given_unit || after < before)
    {
        let rule = format!("must be a number of {}, at least {before}", unit.plural());
        errors.push(FieldError::new("spec.searcher.maxLength", &json!(given.max_length), &rule));
    }
    if errors.is_empty() { Ok(()) } else { Err(errors) }
}

/// Returns why the total number of trials cannot be changed from `before`; `None` if it can.
pub fn check_max_trials(given: &Searcher, before: u32, trials_created: u32) -> Option<FieldError> {
    let after = max_trials(given).filter(|after| *after < before.min(trials_created))?;
    let method = given.methods_set().first().copied().unwrap_or_default();
    let rule = format!(
        "must be at least {trials_created}, the number of trials created; to end the experiment, \
         cancel it with `stoker experiment cancel`"
    );
    let path = format!("spec.searcher.{method}.maxTrials");
    Some(FieldError::new(&path, &json!(after), &rule))
}

/// Returns whether the brackets of a method are fixed.
fn has_fixed_rungs(searcher: &Searcher) -> bool {
    searcher.sync_halving.is_some()
        || searcher.adaptive.is_some()
        || searcher.adaptive_simple.is_some()
        || searcher.hyperband.is_some()
        || searcher.pbt.is_some()
}

fn max_trials(searcher: &Searcher) -> Option<u32> {
    max_trials_mut(&mut searcher.clone()).copied()
}

fn max_trials_mut(searcher: &mut Searcher) -> Option<&mut u32> {
    let Searcher { random, tpe, sobol, async_halving, adaptive_asha, external, .. } = searcher;
    None.or(random.as_mut().map(|search| &mut search.max_trials))
        .or(sobol.as_mut().map(|search| &mut search.max_trials))
        .or(tpe.as_mut().map(|search| &mut search.max_trials))
        .or(async_halving.as_mut().map(|search| &mut search.max_trials))
        .or(adaptive_asha.as_mut().map(|search| &mut search.max_trials))
        .or(external.as_mut().map(|search| &mut search.max_trials))
}

fn concurrency(searcher: &Searcher) -> Option<u32> {
    concurrency_mut(&mut searcher.clone()).copied()
}

fn concurrency_mut(searcher: &mut Searcher) -> Option<&mut u32> {
    let Searcher { random, grid, tpe, sobol, async_halving, adaptive_asha, .. } = searcher;
    let Searcher { sync_halving, adaptive, adaptive_simple, hyperband, external, .. } = searcher;
    None.or(random.as_mut().map(|search| &mut search.max_concurrent_trials))
        .or(sobol.as_mut().map(|search| &mut search.max_concurrent_trials))
        .or(grid.as_mut().map(|search| &mut search.max_concurrent_trials))
        .or(tpe.as_mut().map(|search| &mut search.max_concurrent_trials))
        .or(async_halving.as_mut().map(|search| &mut search.max_concurrent_trials))
        .or(adaptive_asha.as_mut().map(|search| &mut search.max_concurrent_trials))
        .or(sync_halving.as_mut().map(|search| &mut search.max_concurrent_trials))
        .or(adaptive.as_mut().map(|search| &mut search.max_concurrent_trials))
        .or(adaptive_simple.as_mut().map(|search| &mut search.max_concurrent_trials))
        .or(hyperband.as_mut().map(|search| &mut search.max_concurrent_trials))
        .or(external.as_mut().map(|search| &mut search.max_concurrent_trials))
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn searcher(method: &str, fields: Value, more: Value) -> Searcher {
        let mut searcher = json!({ "metric": "loss", "maxLength": { "epochs": 9 } });
        searcher[method] = fields;
        searcher.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        serde_json::from_value(searcher).unwrap()
    }

    /// Checks whether an edit of this method leaves nothing that may not be edited.
    fn check(method: &str, before: Value, after: Value, more: Value, is_allowed: bool) {
        let recorded = searcher(method, before, json!({}));
        let given = searcher(method, after, more);
        assert_eq!(with_edits(&recorded, &given) == given, is_allowed, "{given:?}");
    }

    #[test]
    fn only_some_fields_may_be_edited() {
        let random = json!({ "maxTrials": 5 });
        let limits = json!({ "limits": { "seconds": 9 }, "releaseSeconds": 0 });
        check("random", random.clone(), random.clone(), limits, true);
        check("random", random.clone(), random.clone(), json!({ "metric": "accuracy" }), false);
        let more = json!({ "maxTrials": 9, "maxConcurrentTrials": 2 });
        check("random", random, more.clone(), json!({ "maxLength": { "epochs": 12 } }), true);
        check("sobol", json!({ "maxTrials": 5 }), more.clone(), json!({}), true);
        let asha = |rungs| json!({ "maxTrials": 5, "numRungs": rungs });
        check("asyncHalving", asha(2), asha(3), json!({}), false);
        let simple = json!({ "maxTrials": 5 });
        check("adaptiveSimple", simple.clone(), more, json!({}), false);
        let fewer = json!({ "maxTrials": 5, "maxConcurrentTrials": 1 });
        check("adaptiveSimple", simple.clone(), fewer.clone(), json!({}), true);
        check("adaptiveSimple", simple, fewer, json!({ "maxLength": { "epochs": 12 } }), false);
    }

    #[test]
    fn recorded_settings_replace_an_edit() {
        let check = |method: &str, fields: Value, edited: Value, settings: Value| {
            let recorded = searcher(method, fields, json!({}));
            let more = json!({
                "maxLength": { "epochs": 99 }, "limits": { "units": 5 }, "releaseSeconds": 1,
            });
            let given = searcher(method, edited, more);
            let settings = serde_json::from_value(settings).unwrap();
            assert_eq!(with_settings(&given, &settings), recorded, "{method}");
        };
        let settings = json!({
            "maxTrials": 5, "maxConcurrentTrials": 2, "maxLength": 9, "releaseSeconds": 60,
        });
        let before = json!({ "maxTrials": 5, "maxConcurrentTrials": 2 });
        let edited = json!({ "maxTrials": 7, "maxConcurrentTrials": 3 });
        check("random", before.clone(), edited.clone(), settings.clone());
        check("tpe", before, edited, settings);
        check("single", json!({}), json!({}), json!({ "maxLength": 9, "releaseSeconds": 60 }));
    }

    #[test]
    fn edits_cannot_take_back_what_was_done() {
        let recorded = searcher("random", json!({ "maxTrials": 5 }), json!({}));
        let check = |max_trials: u32, created: u32, length: Value, expected: &[&str]| {
            let fields = json!({ "maxTrials": max_trials });
            let given = searcher("random", fields, json!({ "maxLength": length }));
            let errors = check_edit(&recorded, &given, created).err().unwrap_or_default();
            let paths: Vec<_> = errors.iter().map(|error| error.path.as_str()).collect();
            assert_eq!(paths, expected);
        };
        check(4, 4, json!({ "epochs": 9 }), &[]);
        check(3, 4, json!({ "epochs": 9 }), &["spec.searcher.random.maxTrials"]);
        // Replacements of invalid trials are created too.
        check(6, 8, json!({ "epochs": 10 }), &[]);
        check(5, 0, json!({ "epochs": 8 }), &["spec.searcher.maxLength"]);
        check(5, 0, json!({ "batches": 9 }), &["spec.searcher.maxLength"]);
        let shorter =
            searcher("random", json!({ "maxTrials": 5 }), json!({ "maxLength": { "epochs": 8 } }));
        let errors = check_edit(&recorded, &shorter, 0).unwrap_err();
        assert_eq!(errors[0].rule, "must be a number of epochs, at least 9");
    }
}
