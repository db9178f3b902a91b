//! Rules of new experiments. Experiments that have started may violate them, because an earlier
//! version accepted them.

mod names;

use serde_json::{Value, json};

use super::searches::RUNGS_MAX;
use super::{FieldError, Method, TRIALS_MAX, ValidExperiment, item, member, rules, sizes};
use crate::experiment::ExperimentSpec;
use crate::hyperparameters::{LogRange, ONE_OF, Parameter, ROOT, Space};

/// Remedy for a budget of too many trials.
const LOWER: &str = "lower it, or raise maxLength";

/// Checks values that do not depend on the search, so that they are reported with all other errors.
pub(super) fn check_values(spec: &ExperimentSpec) -> Vec<FieldError> {
    let mut errors = vec![];
    // `rules` reports invalid hyperparameters.
    let Ok(space) = Space::parse(&spec.hyperparameters) else { return errors };
    check_logs(&space, ROOT, &mut errors);
    names::check(&space, &mut errors);
    let (data, hyperparameters) = (&spec.data, Some(&spec.hyperparameters));
    let too_large = rules::check_trial_bytes(spec, &space)
        .or_else(|| rules::check_program_bytes(data, hyperparameters, &spec.for_programs()));
    errors.extend(too_large);
    errors
}

/// Checks the brackets and the number of trials.
pub(super) fn check_search(valid: &ValidExperiment) -> Vec<FieldError> {
    let num_brackets = check_num_brackets(&valid.method);
    let num_trials = check_num_trials(&valid.method, valid.units_max);
    num_brackets.into_iter().chain(num_trials).collect()
}

fn check_logs(space: &Space, path: &str, errors: &mut Vec<FieldError>) {
    match space {
        Space::Parameter(Parameter::Log(range)) => check_log(range, &member(path, "log"), errors),
        Space::Parameter(_) => {}
        Space::Group(members) => {
            for (name, space) in members {
                check_logs(space, &member(path, name), errors);
            }
        }
        Space::OneOf(groups) => {
            for (i, group) in groups.iter().enumerate() {
                check_logs(group, &item(&member(path, ONE_OF), i), errors);
            }
        }
    }
}

/// With base 1, all values are equal. With less, the bounds of values are in reverse order. Values
/// near a bound whose power rounds to 0 are 0, which is outside of the space.
fn check_log(range: &LogRange, path: &str, errors: &mut Vec<FieldError>) {
    let base = range.base;
    if base <= 1.0 {
        let rule = "must be more than 1; for smaller values, use negative exponents";
        errors.push(FieldError::new(&member(path, "base"), &json!(base), rule));
        return;
    }
    for (name, exponent) in [("min", range.min), ("max", range.max)] {
        if base.powf(exponent) == 0.0 {
            let rule =
                format!("min and max are exponents, and {base} to this power is 0; raise it");
            errors.push(FieldError::new(&member(path, name), &json!(exponent), &rule));
        }
    }
}

fn check_num_brackets(method: &Method) -> Option<FieldError> {
    let (name, bracket_rungs) = match method {
        Method::AdaptiveAsha(search) => ("adaptiveAsha", &search.bracket_rungs),
        Method::Adaptive { search, .. } => ("adaptive", &search.bracket_rungs),
        Method::AdaptiveSimple(search) => ("adaptiveSimple", &search.bracket_rungs),
        _ => return None,
    };
    let rule = format!("must have at most {RUNGS_MAX} brackets");
    let path = format!("spec.searcher.{name}.bracketRungs");
    let is_long = bracket_rungs.len() > RUNGS_MAX as usize;
    is_long.then(|| FieldError::new(&path, &json!(bracket_rungs), &rule))
}

/// Checks the number of trials of methods for which it follows from `units`, the full length.
fn check_num_trials(method: &Method, units: u64) -> Option<FieldError> {
    let num_trials = num_trials(method, units)?;
    let (field, value, remedy): (_, Value, _) = match method {
        Method::SyncHalving { search, .. } => ("syncHalving.budget", json!(search.budget), LOWER),
        Method::Adaptive { search, .. } => ("adaptive.budget", json!(search.budget), LOWER),
        Method::Hyperband(search) => {
            let remedy = "raise it, or give maxLength in larger units";
            ("hyperband.divisor", json!(search.divisor), remedy)
        }
        _ => return None,
    };
    let rule = format!("leads to {num_trials} trials, more than {TRIALS_MAX}; {remedy}");
    let is_large = num_trials > u128::from(TRIALS_MAX);
    let method = field.split('.').next().map(|name| format!("spec.searcher.{name}"));
    is_large.then(|| {
        let error = FieldError::new(&format!("spec.searcher.{field}"), &value, &rule);
        error.reading(&[rules::MAX_LENGTH, method.as_deref().unwrap_or_default()])
    })
}

/// Returns the number of trials of methods for which it follows from `units`, the full length.
pub(super) fn num_trials(method: &Method, units: u64) -> Option<u128> {
    Some(match method {
        Method::SyncHalving { search, budget } => {
            sizes::budget_sizes(units, search.divisor, search.num_rungs, *budget)[0]
        }
        Method::Adaptive { search, budget } => {
            let rungs = search.rungs(units);
            let share = budget / rungs.len() as u64;
            let size = |rungs: &u32| sizes::budget_sizes(units, search.divisor, *rungs, share)[0];
            rungs.iter().map(size).sum()
        }
        Method::Hyperband(search) => {
            let brackets = sizes::hyperband_sizes(units, search.divisor, search.num_brackets);
            brackets.iter().map(|sizes| sizes[0]).sum()
        }
        _ => return None,
    })
}
