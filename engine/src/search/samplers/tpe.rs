//! Tree-structured Parzen estimator (TPE): samples where good trials are denser than bad ones.
//!
//! Source: Bergstra et al., "Algorithms for Hyper-Parameter Optimization" (2011); numbers as in
//! Optuna: 10 random trials, 24 candidates, a tenth of the trials is good, at most 25.

use serde_json::Value;
use stoker_api::hyperparameters::{Parameter, Space};

use super::parzen::{Axis, Parzen};
use crate::search::pareto;
use crate::search::rng::Random;
use crate::search::rung::Loss;
use crate::search::sample::{group_of, json_number, normalized, sample};

/// Trials with random hyperparameters at the beginning.
const NUM_RANDOM: usize = 10;
/// Candidates for each choice.
const NUM_CANDIDATES: usize = 24;
/// Maximum number of good trials.
const GOOD_MAX: usize = 25;

/// Parameters of a space that vary, as axes.
#[derive(Clone, Debug, PartialEq)]
pub struct Tpe {
    space: Space,
    block: Block,
    is_multivariate: bool,
}

/// Axes that are active together: those of all groups that are in no choice, or those of one group
/// of a choice.
#[derive(Clone, Debug, Default, PartialEq)]
struct Block {
    dimensions: Vec<Dimension>,
}

/// A parameter or a choice that varies.
#[derive(Clone, Debug, PartialEq)]
struct Dimension {
    /// Index of the coordinate in a point.
    index: usize,
    axis: Axis,
    /// Blocks of a choice's groups; empty for a parameter.
    groups: Vec<Block>,
}

/// Coordinates of hyperparameters in the order of their names; `None` for those that are not
/// active.
pub type Point = Vec<Option<f64>>;

/// A trial from which TPE learns.
#[derive(Clone, Debug, PartialEq)]
pub struct Observation {
    /// Coordinates, by [`Tpe::coordinates`].
    pub point: Point,
    /// Loss; `None` while the trial runs, which counts as bad.
    pub loss: Option<Loss>,
    /// Other objectives; empty if there are none.
    pub others: Vec<Loss>,
}

impl Tpe {
    /// Returns a sampler of a space. With `is_multivariate`, it estimates parameters that are
    /// active together jointly.
    pub fn new(space: Space, is_multivariate: bool) -> Self {
        let mut block = Block::default();
        block.add(&space, &mut 0);
        Self { space, block, is_multivariate }
    }

    /// Returns the coordinates of hyperparameters; `None` if they are not of this space.
    pub fn coordinates(&self, hyperparameters: &Value) -> Option<Point> {
        let mut point = vec![];
        locate(&self.space, Some(hyperparameters), &mut point)?;
        Some(point)
    }

    /// Samples hyperparameters. Observations are in the order of their trials.
    pub fn draw(&self, observations: &[Observation], random: &mut Random) -> Value {
        let finished: Vec<&Observation> =
            observations.iter().filter(|observation| observation.loss.is_some()).collect();
        if finished.len() < NUM_RANDOM || self.block.dimensions.is_empty() {
            return sample(&self.space, random);
        }
        let good = best(finished);
        let is_good = |observation: &&Observation| {
            good.iter().any(|other| std::ptr::eq(*other, *observation))
        };
        // Running trials count as bad. Both sets stay in the order of their trials.
        let (good, bad): (Vec<&Observation>, Vec<_>) = observations.iter().partition(is_good);
        let good: Vec<&Point> = good.into_iter().map(|observation| &observation.point).collect();
        let bad: Vec<&Point> = bad.into_iter().map(|observation| &observation.point).collect();
        let mut point = vec![];
        self.draw_block(&self.block, &good, &bad, random, &mut point);
        assemble(&self.space, &mut point.into_iter())
    }

    /// Samples the coordinates of a block, then those of the groups that it chooses. Estimators use
    /// only trials in which the block is active.
    fn draw_block(
        &self,
        block: &Block,
        good: &[&Point],
        bad: &[&Point],
        random: &mut Random,
        point: &mut Point,
    ) {
        let size = if self.is_multivariate { block.dimensions.len().max(1) } else { 1 };
        for dimensions in block.dimensions.chunks(size) {
            let axes: Vec<Axis> = dimensions.iter().map(|dimension| dimension.axis).collect();
            let (good, bad) = (active(dimensions, good), active(dimensions, bad));
            let drawn = best_candidate(&axes, &good, &bad, random);
            for (dimension, x) in dimensions.iter().zip(drawn) {
                let num = point.len().max(dimension.index + 1);
                point.resize(num, None);
                point[dimension.index] = Some(x);
            }
        }
        for dimension in &block.dimensions {
            let chosen = point[dimension.index].and_then(|x| dimension.groups.get(x as usize));
            if let Some(group) = chosen {
                self.draw_block(group, good, bad, random, point);
            }
        }
    }
}

impl Block {
    /// Adds the axes of a space. `next` is the index of the next coordinate.
    fn add(&mut self, space: &Space, next: &mut usize) {
        match space {
            Space::Group(members) => members.values().for_each(|member| self.add(member, next)),
            Space::Parameter(parameter) => {
                let Some(axis) = axis(parameter) else { return };
                self.dimensions.push(Dimension { index: *next, axis, groups: vec![] });
                *next += 1;
            }
            Space::OneOf(groups) => {
                let (index, axis) = (*next, Axis::Choice(groups.len()));
                *next += 1;
                let block = |group: &Space| {
                    let mut block = Self::default();
                    block.add(group, next);
                    block
                };
                let groups = groups.iter().map(block).collect();
                self.dimensions.push(Dimension { index, axis, groups });
            }
        }
    }
}

/// Returns the coordinates of the points in which these dimensions are active.
fn active(dimensions: &[Dimension], points: &[&Point]) -> Vec<Vec<f64>> {
    let of = |point: &&Point| dimensions.iter().map(|dimension| point[dimension.index]).collect();
    points.iter().filter_map(of).collect()
}

/// Returns the good ones of finished trials. With several objectives, these are the first Pareto
/// fronts.
fn best(mut finished: Vec<&Observation>) -> Vec<&Observation> {
    let num_good = finished.len().div_ceil(10).min(GOOD_MAX);
    if finished.iter().all(|observation| observation.others.is_empty()) {
        // Stable: of equal losses, the older trial is better.
        finished.sort_by_key(|observation| observation.loss);
        finished.truncate(num_good);
        return finished;
    }
    let losses = |observation: &&Observation| {
        observation.loss.iter().chain(&observation.others).copied().collect()
    };
    let points: Vec<Vec<Loss>> = finished.iter().map(losses).collect();
    pareto::best(&points, num_good).into_iter().map(|index| finished[index]).collect()
}

/// Returns the candidate from the good points with the greatest ratio of densities.
fn best_candidate(
    axes: &[Axis],
    good: &[Vec<f64>],
    bad: &[Vec<f64>],
    random: &mut Random,
) -> Vec<f64> {
    let (good, bad) = (Parzen::new(axes, good), Parzen::new(axes, bad));
    let mut best: Option<(f64, Vec<f64>)> = None;
    for _ in 0..NUM_CANDIDATES {
        let point = good.sample(random);
        let ratio = good.log_density(&point) - bad.log_density(&point);
        if best.as_ref().is_none_or(|(most, _)| ratio > *most) {
            best = Some((ratio, point));
        }
    }
    best.map(|(_, point)| point).unwrap_or_default()
}

/// Returns the axis of a parameter; `None` for a constant.
fn axis(parameter: &Parameter) -> Option<Axis> {
    match parameter {
        Parameter::Const(_) => None,
        // Relative to the minimum: doubles cannot tell large integers apart.
        Parameter::Int(range) => {
            Some(Axis::Integer { low: 0.0, high: range.max.abs_diff(range.min) as f64 })
        }
        Parameter::Double(range) => Some(Axis::Number { low: range.min, high: range.max }),
        Parameter::Log(range) => Some(Axis::Number { low: range.min, high: range.max }),
        Parameter::Categorical(values) => Some(Axis::Choice(values.len())),
    }
}

/// Appends the coordinates of a value; `None` for each of them if the space is not active.
fn locate(space: &Space, value: Option<&Value>, point: &mut Point) -> Option<()> {
    match space {
        Space::Parameter(Parameter::Const(_)) => {}
        Space::Parameter(parameter) => {
            point.push(match value {
                Some(value) => Some(coordinate(parameter, value)?),
                None => None,
            });
        }
        Space::Group(members) => {
            for (name, member) in members {
                let value = match value {
                    Some(value) => Some(value.get(name)?),
                    None => None,
                };
                locate(member, value, point)?;
            }
        }
        Space::OneOf(groups) => {
            let chosen = match value {
                Some(value) => Some(group_of(groups, value)?),
                None => None,
            };
            point.push(chosen.map(|chosen| chosen as f64));
            for (i, group) in groups.iter().enumerate() {
                locate(group, value.filter(|_| chosen == Some(i)), point)?;
            }
        }
    }
    Some(())
}

fn coordinate(parameter: &Parameter, value: &Value) -> Option<f64> {
    Some(match parameter {
        Parameter::Const(_) => 0.0,
        Parameter::Int(range) => {
            value.as_i64()?.clamp(range.min, range.max).abs_diff(range.min) as f64
        }
        Parameter::Double(range) => value.as_f64()?.clamp(range.min, range.max),
        Parameter::Log(range) => {
            let exponent = value.as_f64()?.ln() / range.base.ln();
            // With base 1, which earlier versions accepted, all values are equal.
            if exponent.is_nan() { range.min } else { exponent.clamp(range.min, range.max) }
        }
        Parameter::Categorical(values) => {
            values.iter().position(|choice| normalized(choice) == *value)? as f64
        }
    })
}

/// Returns the hyperparameters at a point. Takes the coordinates of groups that were not chosen,
/// too.
fn assemble(space: &Space, point: &mut impl Iterator<Item = Option<f64>>) -> Value {
    match space {
        Space::Parameter(Parameter::Const(value)) => value.clone(),
        Space::Parameter(parameter) => {
            let x = point.next().flatten();
            x.map(|x| value_at(parameter, x)).unwrap_or_default()
        }
        Space::Group(members) => {
            let members = members.iter();
            let members = members.map(|(name, member)| (name.clone(), assemble(member, point)));
            Value::Object(members.collect())
        }
        Space::OneOf(groups) => {
            let chosen = point.next().flatten().map_or(0, |x| x as usize);
            let mut values: Vec<Value> =
                groups.iter().map(|group| assemble(group, point)).collect();
            if chosen < values.len() { values.swap_remove(chosen) } else { Value::Null }
        }
    }
}

fn value_at(parameter: &Parameter, x: f64) -> Value {
    match parameter {
        Parameter::Const(value) => value.clone(),
        Parameter::Int(range) => {
            let value = i128::from(range.min) + x as i128;
            Value::from(value.clamp(range.min.into(), range.max.into()) as i64)
        }
        Parameter::Double(_) => json_number(x),
        Parameter::Log(range) => json_number(range.base.powf(x)),
        Parameter::Categorical(values) => values.get(x as usize).cloned().unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn space() -> Space {
        let parameters = json!({
            "rate": { "log": { "base": 10.0, "min": -5.0, "max": 0.0 } },
            "dropout": { "double": { "min": 0.0, "max": 0.9 } },
            "layers": { "int": { "min": 1, "max": 8 } },
            "optimizer": { "categorical": ["sgd", "adam", "adagrad"] },
            "fixed": { "const": 7 },
        });
        Space::parse(&parameters).unwrap()
    }

    /// A smooth function of all parameters, with its minimum 0 inside the space.
    fn loss(value: &Value) -> f64 {
        let number = |name: &str| value[name].as_f64().unwrap();
        let choice = if value["optimizer"] == "adam" { 0.0 } else { 0.5 };
        (number("rate").log10() + 3.0).powi(2) / 4.0
            + (number("dropout") - 0.3).powi(2) * 4.0
            + (number("layers") - 5.0).powi(2) / 8.0
            + choice
    }

    /// Returns the least loss of 60 trials.
    fn search(seed: u32, is_multivariate: Option<bool>) -> f64 {
        let tpe = Tpe::new(space(), is_multivariate == Some(true));
        let mut random = Random::new(seed);
        let mut observations = vec![];
        let mut best = f64::INFINITY;
        for _ in 0..60 {
            let value = match is_multivariate {
                None => sample(&space(), &mut random),
                Some(_) => tpe.draw(&observations, &mut random),
            };
            let value = normalized(&value);
            best = best.min(loss(&value));
            let point = tpe.coordinates(&value).unwrap();
            let loss = Some(Loss::new(loss(&value)));
            observations.push(Observation { point, loss, others: vec![] });
        }
        best
    }

    #[test]
    fn tpe_finds_better_hyperparameters_than_random() {
        let mean =
            |is_multivariate| (0..20).map(|seed| search(seed, is_multivariate)).sum::<f64>() / 20.0;
        let (random, tpe, joint) = (mean(None), mean(Some(false)), mean(Some(true)));
        assert!(tpe < 0.5 * random, "{tpe} {random}");
        assert!(joint < 0.5 * random, "{joint} {random}");
    }

    #[test]
    fn first_ten_trials_are_random() {
        let tpe = Tpe::new(space(), false);
        let value = json!({
            "rate": 0.1, "dropout": 0.5, "layers": 3, "optimizer": "sgd", "fixed": 7,
        });
        let point = tpe.coordinates(&value).unwrap();
        let observation = |loss: Option<Loss>| {
            let point = point.clone();
            Observation { point, loss, others: vec![] }
        };
        let mut observations = vec![observation(Some(Loss::new(1.0))); 9];
        // Running trials do not count.
        observations.push(observation(None));
        let random = sample(&space(), &mut Random::new(5));
        assert_eq!(tpe.draw(&observations, &mut Random::new(5)), random);
        observations.push(observation(Some(Loss::new(1.0))));
        assert_ne!(tpe.draw(&observations, &mut Random::new(5)), random);
    }

    #[test]
    fn first_of_equal_candidates_is_drawn() {
        let axes = [Axis::Number { low: 0.0, high: 1.0 }];
        let first = Parzen::new(&axes, &[]).sample(&mut Random::new(5));
        assert_eq!(best_candidate(&axes, &[], &[], &mut Random::new(5)), first);
    }

    #[test]
    fn coordinates_lead_back_to_the_hyperparameters() {
        let tpe = Tpe::new(space(), false);
        let mut random = Random::new(1);
        for _ in 0..100 {
            let value = normalized(&sample(&space(), &mut random));
            let point = tpe.coordinates(&value).unwrap();
            let back = normalized(&assemble(&space(), &mut point.into_iter()));
            for name in ["dropout", "layers", "optimizer", "fixed"] {
                assert_eq!(back[name], value[name]);
            }
            let ratio = back["rate"].as_f64().unwrap() / value["rate"].as_f64().unwrap();
            assert!((ratio - 1.0).abs() < 1e-12, "{ratio}");
        }
        assert_eq!(tpe.coordinates(&json!({ "rate": 0.1 })), None);
    }

    #[test]
    fn large_integers_stay_in_their_range() {
        let first = 1_700_000_000_000_000_000_i64;
        for (min, max) in [(first, first + 100), (first + 100, first + 1000), (i64::MIN, i64::MAX)]
        {
            let space = json!({ "x": { "int": { "min": min, "max": max } } });
            let tpe = Tpe::new(Space::parse(&space).unwrap(), false);
            let mut random = Random::new(1);
            let mut observations = vec![];
            for index in 0..50 {
                let value = normalized(&tpe.draw(&observations, &mut random));
                let x = value["x"].as_i64().unwrap();
                assert!((min..=max).contains(&x), "{x}");
                let point = tpe.coordinates(&value).unwrap();
                let loss = Some(Loss::new(f64::from(index % 7)));
                observations.push(Observation { point, loss, others: vec![] });
            }
        }
    }

    /// Two optimizers with a rate each; the better one has its optimum at 0.001.
    fn conditional_space() -> Space {
        let rate = json!({ "log": { "min": -5, "max": 0 } });
        Space::parse(&json!({
            "width": { "int": { "min": 1, "max": 9 } },
            "optimizer": { "oneOf": [
                { "name": "sgd", "rate": rate, "momentum": { "double": { "min": 0, "max": 1 } } },
                { "name": "adam", "rate": rate },
                {},
            ] },
        }))
        .unwrap()
    }

    #[test]
    fn inactive_coordinates_are_unset() {
        let tpe = Tpe::new(conditional_space(), false);
        let check = |optimizer: Value, expected: [Option<f64>; 5]| {
            let value = json!({ "optimizer": optimizer, "width": 4 });
            let point = tpe.coordinates(&value).unwrap();
            assert_eq!(point, expected, "{value}");
            let back = assemble(&conditional_space(), &mut point.into_iter());
            assert_eq!(normalized(&back), value);
        };
        let sgd = json!({ "name": "sgd", "rate": 1, "momentum": 0.5 });
        check(sgd, [Some(0.0), Some(0.5), Some(0.0), None, Some(3.0)]);
        check(json!({ "name": "adam", "rate": 1 }), [Some(1.0), None, None, Some(0.0), Some(3.0)]);
        check(json!({}), [Some(2.0), None, None, None, Some(3.0)]);
        assert_eq!(tpe.coordinates(&json!({ "optimizer": { "name": "lamb" }, "width": 4 })), None);
    }

    #[test]
    fn points_without_a_dimension_are_left_out() {
        let dimensions =
            [0, 2].map(|index| Dimension { index, axis: Axis::Choice(2), groups: vec![] });
        let points: [Point; 3] = [
            vec![Some(1.0), None, Some(3.0)],
            vec![Some(1.0), Some(2.0), None],
            vec![Some(4.0), Some(5.0), Some(6.0)],
        ];
        let points: Vec<&Point> = points.iter().collect();
        assert_eq!(active(&dimensions, &points), [[1.0, 3.0], [4.0, 6.0]]);
        assert_eq!(active(&dimensions[..1], &points).len(), 3);
    }

    #[test]
    fn estimators_use_only_active_trials() {
        for is_multivariate in [false, true] {
            let tpe = Tpe::new(conditional_space(), is_multivariate);
            let observation = |optimizer: Value, loss: f64| Observation {
                point: tpe.coordinates(&json!({ "optimizer": optimizer, "width": 4 })).unwrap(),
                loss: Some(Loss::new(loss)),
                others: vec![],
            };
            // All good trials use adam with 0.001. Those with sgd have another rate.
            let adam = |_| observation(json!({ "name": "adam", "rate": 0.001 }), 0.0);
            let mut observations: Vec<_> = (0..4).map(adam).collect();
            observations.extend((0..26).map(|i| {
                let rate = 0.1 + f64::from(i) / 100.0;
                observation(json!({ "name": "sgd", "rate": rate, "momentum": 0.5 }), 1.0)
            }));
            let mut random = Random::new(5);
            let draws: Vec<Value> =
                (0..200).map(|_| tpe.draw(&observations, &mut random)).collect();
            let names = |name: &str| {
                draws.iter().filter(|value| value["optimizer"]["name"] == name).count()
            };
            assert!(names("adam") > 120, "{}", names("adam"));
            let is_near = |value: &&Value| {
                value["optimizer"]["name"] == "adam"
                    && (value["optimizer"]["rate"].as_f64().unwrap().log10() + 3.0).abs() < 1.0
            };
            let num_near = draws.iter().filter(is_near).count();
            assert!(10 * num_near > 7 * names("adam"), "{num_near} {}", names("adam"));
            assert!(draws.iter().all(|value| tpe.coordinates(&normalized(value)).is_some()));
        }
    }

    /// Minimizes x and 1 - x in one half of the space, and is worse in the other one.
    #[test]
    fn good_trials_are_the_first_fronts() {
        let space =
            json!({ "x": { "double": { "min": 0, "max": 1 } }, "bad": { "categorical": [0, 1] } });
        let tpe = Tpe::new(Space::parse(&space).unwrap(), false);
        let draw = |observations: &[Observation], random: &mut Random| {
            let value = normalized(&tpe.draw(observations, random));
            let (x, bad) = (value["x"].as_f64().unwrap(), value["bad"].as_f64().unwrap());
            let point = tpe.coordinates(&value).unwrap();
            let losses = [x + bad, 1.0 - x + bad].map(Loss::new);
            (x, bad, Observation { point, loss: Some(losses[0]), others: vec![losses[1]] })
        };
        for seed in 0..4 {
            let mut random = Random::new(seed);
            let (mut observations, mut draws) = (vec![], vec![]);
            for _ in 0..100 {
                let (x, bad, observation) = draw(&observations, &mut random);
                observations.push(observation);
                draws.push((x, bad));
            }
            let late = &draws[50..];
            let num_good = late.iter().filter(|(_, bad)| *bad == 0.0).count();
            assert!(num_good > 40, "seed {seed}: {num_good}");
            // With one objective, all draws would be on one side.
            for side in [0.0..0.4, 0.6..1.0] {
                let num = late.iter().filter(|(x, _)| side.contains(x)).count();
                assert!(num > 5, "seed {seed}, {side:?}: {num}");
            }
        }
    }
}
