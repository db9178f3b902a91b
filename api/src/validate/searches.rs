//! Validation rules of search methods.

use serde_json::json;

use super::external;
use super::rules::{MAX_LENGTH, check_length, union_error};
use super::{FieldError, Method, TRIALS_MAX};
use crate::experiment::{Length, MEDIAN_STEPS_MAX, PbtSearch, SearchLimits, Searcher};

/// Maximum number of brackets and rungs, so that sizes fit into 64 bits.
pub(super) const RUNGS_MAX: u32 = 16;

/// Maximum number of experiments with prior trials, and of those trials.
const PRIOR_EXPERIMENTS_MAX: usize = 16;
const PRIOR_TRIALS_MAX: u32 = 64;

/// Maximum size of a population, and maximum number of rounds. The steps at the end of a round are
/// recorded in one trial.
const POPULATION_MAX: u32 = 1000;
const ROUNDS_MAX: u32 = 128;
/// Maximum product of both. The steps of all rounds take less than 300 KB, even if the same trial
/// records all of them.
const POPULATION_ROUNDS_MAX: u32 = 2048;

/// Paths of the fields that determine the length of a trial.
const LENGTHS: [&str; 3] =
    [MAX_LENGTH, "spec.searcher.pbt.numRounds", "spec.searcher.pbt.lengthPerRound"];

/// Maximum number of objectives.
const OBJECTIVES_MAX: usize = 4;

/// Refuses an experiment that waits for its own trials.
pub(super) fn check_own_name(name: &str, searcher: &Searcher, errors: &mut Vec<FieldError>) {
    let names = searcher.prior_trials.iter().flat_map(|prior| &prior.experiments);
    for (i, prior) in names.enumerate().filter(|(_, prior)| *prior == name) {
        let path = format!("spec.searcher.priorTrials.experiments[{i}]");
        let rule = "is this experiment; name earlier ones, or rename this one";
        errors.push(FieldError::new(&path, &json!(prior), rule));
    }
}

/// Checks the method that is set. Errors name its fields below `spec.searcher`.
pub(super) fn method(searcher: &Searcher, errors: &mut Vec<FieldError>) -> Option<Method> {
    let mut checker = Checker { searcher, errors };
    checker.check_parts();
    if searcher.single.is_some() {
        return Some(Method::Single);
    }
    if let Some(search) = searcher.random {
        checker.check_trials("random.maxTrials", search.max_trials);
        let (max_trials, max_concurrent) = (search.max_trials, search.max_concurrent_trials);
        return Some(Method::Random { max_trials, max_concurrent });
    }
    if let Some(search) = searcher.grid {
        return Some(Method::Grid { max_concurrent: search.max_concurrent_trials });
    }
    if let Some(search) = searcher.async_halving {
        checker.check_trials("asyncHalving.maxTrials", search.max_trials);
        checker.check_divisor("asyncHalving.divisor", search.divisor);
        checker.check_rungs("asyncHalving.numRungs", search.num_rungs, search.divisor);
        return Some(Method::AsyncHalving(search));
    }
    if let Some(search) = searcher.adaptive_asha.clone() {
        checker.check_trials("adaptiveAsha.maxTrials", search.max_trials);
        checker.check_divisor("adaptiveAsha.divisor", search.divisor);
        checker.check_max_rungs("adaptiveAsha.maxRungs", search.max_rungs);
        checker.check_bracket_rungs("adaptiveAsha", &search.bracket_rungs, search.divisor);
        return Some(Method::AdaptiveAsha(search));
    }
    if let Some(search) = searcher.sync_halving {
        checker.check_divisor("syncHalving.divisor", search.divisor);
        checker.check_rungs("syncHalving.numRungs", search.num_rungs, search.divisor);
        let budget = checker.check_budget("syncHalving.budget", &search.budget)?;
        return Some(Method::SyncHalving { search, budget });
    }
    if let Some(search) = searcher.adaptive.clone() {
        checker.check_divisor("adaptive.divisor", search.divisor);
        checker.check_max_rungs("adaptive.maxRungs", search.max_rungs);
        checker.check_bracket_rungs("adaptive", &search.bracket_rungs, search.divisor);
        let budget = checker.check_budget("adaptive.budget", &search.budget)?;
        return Some(Method::Adaptive { search, budget });
    }
    if let Some(search) = searcher.adaptive_simple.clone() {
        checker.check_trials("adaptiveSimple.maxTrials", search.max_trials);
        checker.check_divisor("adaptiveSimple.divisor", search.divisor);
        checker.check_max_rungs("adaptiveSimple.maxRungs", search.max_rungs);
        checker.check_bracket_rungs("adaptiveSimple", &search.bracket_rungs, search.divisor);
        return Some(Method::AdaptiveSimple(search));
    }
    if let Some(search) = searcher.hyperband {
        checker.check_divisor("hyperband.divisor", search.divisor);
        return Some(Method::Hyperband(search));
    }
    if let Some(search) = searcher.sobol {
        checker.check_trials("sobol.maxTrials", search.max_trials);
        return Some(Method::Sobol(search));
    }
    if let Some(search) = searcher.pbt {
        let units_per_round = checker.check_pbt(&search)?;
        return Some(Method::Pbt { search, units_per_round });
    }
    if let Some(search) = searcher.external.clone() {
        checker.check_trials("external.maxTrials", search.max_trials);
        external::check(searcher, &search, errors);
        return Some(Method::External(search));
    }
    let search = searcher.tpe?;
    checker.check_trials("tpe.maxTrials", search.max_trials);
    Some(Method::Tpe(search))
}

/// Methods that sample in their own way.
const SAMPLING: [&str; 4] = ["grid", "tpe", "sobol", "pbt"];

struct Checker<'a> {
    searcher: &'a Searcher,
    errors: &'a mut Vec<FieldError>,
}

impl Checker<'_> {
    /// Checks the parts that fit any method.
    fn check_parts(&mut self) {
        self.check_sampler();
        self.check_prior_trials();
        self.check_limits();
        self.check_median_stopping();
        self.check_objectives();
    }

    fn push(&mut self, path: &str, value: &serde_json::Value, rule: &str) {
        self.errors.push(FieldError::new(&format!("spec.searcher.{path}"), value, rule));
    }

    /// Adds an error of a rule that reads other fields too.
    fn push_reading(&mut self, path: &str, value: &serde_json::Value, rule: &str, others: &[&str]) {
        let error = FieldError::new(&format!("spec.searcher.{path}"), value, rule);
        self.errors.push(error.reading(others));
    }

    fn check_sampler(&mut self) {
        let Some(sampler) = self.searcher.sampler else { return };
        let methods = self.searcher.methods_set();
        if let Some(method) = methods.iter().find(|name| SAMPLING.contains(name)) {
            let rule = format!("must be unset: {method} samples in its own way");
            return self.push("sampler", &json!(sampler), &rule);
        }
        let set = sampler.set();
        if set.len() != 1 {
            let rule = "exactly one of tpe and sobol must be set";
            self.errors.push(union_error("spec.searcher.sampler", &set, rule));
        }
    }

    fn check_prior_trials(&mut self) {
        let Some(prior) = &self.searcher.prior_trials else { return };
        if self.searcher.grid.is_some() {
            let rule = "must be unset: grid trains all points of the space";
            self.push("priorTrials", &json!(prior), rule);
        }
        if !self.searcher.objectives.is_empty() {
            let rule = "must be unset: prior trials are compared by one metric; remove objectives";
            self.push("priorTrials", &json!(prior), rule);
        }
        if !(1..=PRIOR_EXPERIMENTS_MAX).contains(&prior.experiments.len()) {
            let rule = format!("must have from 1 to {PRIOR_EXPERIMENTS_MAX} names");
            self.push("priorTrials.experiments", &json!(prior.experiments), &rule);
        }
        if !(1..=PRIOR_TRIALS_MAX).contains(&prior.trials) {
            let rule = format!("must be from 1 to {PRIOR_TRIALS_MAX}");
            self.push("priorTrials.trials", &json!(prior.trials), &rule);
        }
        for (i, name) in prior.experiments.iter().enumerate() {
            if prior.experiments[..i].contains(name) {
                let path = format!("priorTrials.experiments[{i}]");
                self.push(&path, &json!(name), "is named twice; keep one");
            }
        }
    }

    fn check_objectives(&mut self) {
        let objectives = &self.searcher.objectives;
        let Some(first) = objectives.first() else { return };
        if !(2..=OBJECTIVES_MAX).contains(&objectives.len()) {
            let rule = format!("must have from 2 to {OBJECTIVES_MAX} objectives, or be unset");
            self.push("objectives", &json!(objectives), &rule);
        }
        let Searcher { metric, smaller_is_better, .. } = self.searcher;
        if (&first.metric, first.smaller_is_better) != (metric, *smaller_is_better) {
            let rule = "must be searcher.metric with searcher.smallerIsBetter; change either";
            let others = ["spec.searcher.metric", "spec.searcher.smallerIsBetter"];
            self.push_reading("objectives[0]", &json!(first), rule, &others);
        }
        for (i, objective) in objectives.iter().enumerate().skip(1) {
            let path = format!("objectives[{i}].metric");
            let is_repeated = objectives[..i].iter().any(|other| other.metric == objective.metric);
            if objective.metric.trim().is_empty() {
                self.push(&path, &json!(objective.metric), "must name a validation metric");
            } else if is_repeated {
                self.push(&path, &json!(objective.metric), "is an objective twice; keep one");
            }
        }
    }

    fn check_median_stopping(&mut self) {
        let Some(rule) = self.searcher.median_stopping else { return };
        if self.searcher.single.is_some() {
            let reason = "must be unset: single has no other trials to compare with";
            return self.push("medianStopping", &json!(rule), reason);
        }
        if rule.min_trials == 0 {
            self.push("medianStopping.minTrials", &json!(0), "must be at least 1");
        }
        let units = self.searcher.length().map_or(0, |(_, units)| units);
        let every_min = units.div_ceil(MEDIAN_STEPS_MAX).max(1);
        if rule.every_units < every_min {
            let reason = format!(
                "must be at least {every_min}: a trial of {units} units has at most \
                 {MEDIAN_STEPS_MAX} steps"
            );
            let value = json!(rule.every_units);
            self.push_reading("medianStopping.everyUnits", &value, &reason, &LENGTHS);
        }
        if units > 0 && rule.start_units >= units {
            let reason = format!("must be less than searcher.maxLength, which is {units}");
            let value = json!(rule.start_units);
            self.push_reading("medianStopping.startUnits", &value, &reason, &LENGTHS);
        }
    }

    fn check_limits(&mut self) {
        for (limit, maximum) in self.searcher.limits.iter().flat_map(SearchLimits::all) {
            if maximum == 0 {
                let rule = "must be at least 1; remove the field for no limit";
                self.push(&format!("limits.{}", limit.name()), &json!(0), rule);
            }
        }
    }

    fn check_trials(&mut self, path: &str, max_trials: u32) {
        if max_trials == 0 {
            self.push(path, &json!(0), "must be at least 1");
        } else if max_trials > TRIALS_MAX {
            let rule = format!("must be at most {TRIALS_MAX}; lower it, or split the search");
            self.push(path, &json!(max_trials), &rule);
        }
    }

    fn check_divisor(&mut self, path: &str, divisor: u32) {
        if divisor < 2 {
            self.push(path, &json!(divisor), "must be at least 2");
        }
    }

    fn check_max_rungs(&mut self, path: &str, max_rungs: u32) {
        if !(1..=RUNGS_MAX).contains(&max_rungs) {
            self.push(path, &json!(max_rungs), &format!("must be from 1 to {RUNGS_MAX}"));
        }
    }

    /// The shortest rung must have at least one unit, or two rungs would be equal.
    fn check_rungs(&mut self, path: &str, num_rungs: u32, divisor: u32) {
        if num_rungs == 0 {
            return self.push(path, &json!(0), "must be at least 1");
        }
        if num_rungs > RUNGS_MAX {
            let rule = format!("must be at most {RUNGS_MAX}; use fewer rungs");
            return self.push(path, &json!(num_rungs), &rule);
        }
        let Some((_, units)) = self.searcher.max_length.get() else { return };
        if divisor < 2 || units == 0 {
            return;
        }
        let most = units.ilog(u64::from(divisor)) + 1;
        if num_rungs > most {
            let rule = format!(
                "must be at most {most}, because the first rung, maxLength / divisor^(numRungs - \
                 1) = {units} / {divisor}^{}, would be shorter than one unit; raise maxLength, or \
                 use a smaller unit, fewer rungs or a smaller divisor",
                num_rungs - 1
            );
            let method = path.split('.').next().unwrap_or_default();
            let divisor_path = format!("spec.searcher.{method}.divisor");
            self.push_reading(path, &json!(num_rungs), &rule, &[MAX_LENGTH, divisor_path.as_str()]);
        }
    }

    fn check_bracket_rungs(&mut self, method: &str, bracket_rungs: &[u32], divisor: u32) {
        for (index, num_rungs) in bracket_rungs.iter().enumerate() {
            self.check_rungs(&format!("{method}.bracketRungs[{index}]"), *num_rungs, divisor);
        }
    }

    /// Checks a length in the unit of `maxLength`, and returns its units.
    fn check_same_unit(&mut self, path: &str, length: &Length) -> Option<u64> {
        let (unit, units) = check_length(&format!("spec.searcher.{path}"), length, self.errors)?;
        let (expected, _) = self.searcher.max_length.get()?;
        if unit == expected {
            return Some(units);
        }
        let rule = "must have the unit of searcher.maxLength";
        self.push_reading(path, &json!(length), rule, &[MAX_LENGTH]);
        None
    }

    fn check_budget(&mut self, path: &str, budget: &Length) -> Option<u64> {
        let units = self.check_same_unit(path, budget)?;
        let (_, length) = self.searcher.max_length.get()?;
        if (1..length).contains(&units) {
            let rule = "must be at least searcher.maxLength";
            self.push_reading(path, &json!(budget), rule, &[MAX_LENGTH]);
            return None;
        }
        Some(units)
    }

    /// Checks population based training, and returns the units of a round.
    fn check_pbt(&mut self, search: &PbtSearch) -> Option<u64> {
        let PbtSearch { population_size, num_rounds, .. } = *search;
        let num_errors = self.errors.len();
        let mut check_number = |field: &str, value: u32, min: u32, max: u32| {
            if !(min..=max).contains(&value) {
                let rule = format!("must be from {min} to {max}");
                self.push(&format!("pbt.{field}"), &json!(value), &rule);
            }
        };
        check_number("populationSize", population_size, 2, POPULATION_MAX);
        check_number("numRounds", num_rounds, 1, ROUNDS_MAX);
        if self.errors.len() == num_errors && population_size * num_rounds > POPULATION_ROUNDS_MAX {
            let rule = format!(
                "must be at most {POPULATION_ROUNDS_MAX} divided by populationSize, which is \
                 {population_size}: the record of a search is limited"
            );
            let others = ["spec.searcher.pbt.populationSize"];
            self.push_reading("pbt.numRounds", &json!(num_rounds), &rule, &others);
        }
        for (field, value, max) in [
            ("truncateFraction", search.truncate_fraction, 0.5),
            ("resampleProbability", search.resample_probability, 1.0),
            ("perturbFactor", search.perturb_factor, 1.0),
        ] {
            if !(0.0..=max).contains(&value) {
                self.push(
                    &format!("pbt.{field}"),
                    &json!(value),
                    &format!("must be from 0 to {max}"),
                );
            }
        }
        let path = "spec.searcher.pbt.lengthPerRound";
        let (unit, units) = check_length(path, &search.length_per_round, self.errors)?;
        if self.errors.len() > num_errors {
            return None;
        }
        let Some(full) = search.length() else {
            let length = json!(search.length_per_round);
            self.push_reading("pbt.lengthPerRound", &length, "is too long", &LENGTHS);
            return None;
        };
        let given = self.searcher.max_length;
        if !given.is_unset() && given.get() != Some(full) {
            let full = json!(Length::new(unit, full.1));
            let rule = format!(
                "must be {full}, which is lengthPerRound times numRounds; change it, or remove it"
            );
            self.push_reading("maxLength", &json!(given), &rule, &LENGTHS);
        }
        Some(units)
    }
}
