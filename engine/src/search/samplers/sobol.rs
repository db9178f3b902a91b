//! Scrambled Sobol sequence: points that cover the space more evenly than random ones.
//!
//! Every block of 2^k points that begins at a multiple of 2^k has one point in each of 2^k equal
//! intervals of every hyperparameter. The point of a trial depends on the seed and its index alone.
//!
//! Source: Owen, "Randomly permuted (t,m,s)-nets and (t,s)-sequences" (1995), for the scrambling; a
//! hash takes the place of its random permutations.

use serde_json::Value;
use stoker_api::hyperparameters::{Parameter, Space};

use super::joe_kuo::JOE_KUO;
use crate::search::sample::json_number;

/// Bits of an unscrambled coordinate.
const BITS: usize = 32;
/// Bits of a scrambled coordinate: as many as a double holds.
const SCRAMBLED_BITS: u32 = 53;

/// Sampler by a Sobol sequence with one dimension for each hyperparameter that varies.
#[derive(Clone, Debug, PartialEq)]
pub struct Sobol {
    space: Space,
    seed: u32,
    directions: Vec<[u32; BITS]>,
}

impl Sobol {
    /// Returns the sequence for a space of at most
    /// [`SOBOL_DIMENSIONS_MAX`](stoker_api::validate::SOBOL_DIMENSIONS_MAX) dimensions.
    pub fn new(space: Space, seed: u32) -> Self {
        let directions = (0..space.num_dimensions()).map(directions).collect();
        Self { space, seed, directions }
    }

    /// Returns the hyperparameters of a trial.
    pub fn draw(&self, index: u32) -> Value {
        let coordinates = (0..).zip(&self.directions);
        let mut point = coordinates.map(|(dimension, directions)| {
            scrambled(coordinate(directions, index), self.seed, dimension)
        });
        value(&self.space, &mut point)
    }
}

/// Returns the direction numbers of a dimension, from 0.
fn directions(dimension: usize) -> [u32; BITS] {
    let mut directions = [0; BITS];
    let row = dimension.checked_sub(1).map(|row| JOE_KUO[row % JOE_KUO.len()]);
    let Some([polynomial, first @ ..]) = row else {
        (0..BITS).for_each(|i| directions[i] = 1 << (31 - i));
        return directions;
    };
    let degree = first.len();
    for i in 0..BITS {
        directions[i] = match first.get(i) {
            Some(number) => number << (31 - i),
            None => {
                let last = directions[i - degree];
                let is_set = |k: &usize| polynomial >> (degree - 1 - k) & 1 == 1;
                let terms = (1..degree).filter(is_set).map(|k| directions[i - k]);
                terms.fold(last ^ (last >> degree), |sum, term| sum ^ term)
            }
        };
    }
    directions
}

/// Returns a coordinate of a point as a fraction of 2^32.
fn coordinate(directions: &[u32; BITS], index: u32) -> u32 {
    let is_set = |bit: &usize| index >> bit & 1 == 1;
    (0..BITS).filter(is_set).fold(0, |sum, bit| sum ^ directions[bit])
}

/// Returns a scrambled coordinate, from 0 (inclusive) to 1 (exclusive). Each bit is flipped or not
/// by a hash of the bits above it.
fn scrambled(coordinate: u32, seed: u32, dimension: u64) -> f64 {
    let bits = u64::from(coordinate) << (SCRAMBLED_BITS - 32);
    let key = hash(u64::from(seed) << 32 | dimension);
    let flips = (0..SCRAMBLED_BITS).fold(0, |flips, place| {
        // The leading 1 tells prefixes of different lengths apart.
        let prefix = 1 << place | bits >> (SCRAMBLED_BITS - place);
        flips << 1 | hash(key ^ prefix) >> 63
    });
    (bits ^ flips) as f64 / (1_u64 << SCRAMBLED_BITS) as f64
}

/// The finalizer of SplitMix64, after its increment.
fn hash(value: u64) -> u64 {
    let mut hash = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ (hash >> 31)
}

/// Returns the hyperparameters at a point. The groups of a choice have separate coordinates.
fn value(space: &Space, point: &mut impl Iterator<Item = f64>) -> Value {
    match space {
        Space::Parameter(Parameter::Const(value)) => value.clone(),
        Space::Parameter(parameter) => {
            point.next().map(|x| value_at(parameter, x)).unwrap_or_default()
        }
        Space::Group(members) => {
            let members = members.iter();
            Value::Object(
                members.map(|(name, member)| (name.clone(), value(member, point))).collect(),
            )
        }
        Space::OneOf(groups) => {
            let chosen = choice(groups.len(), point.next().unwrap_or_default());
            let mut values: Vec<Value> = groups.iter().map(|group| value(group, point)).collect();
            if chosen < values.len() { values.swap_remove(chosen) } else { Value::Null }
        }
    }
}

/// Returns the index of the interval that contains `x`, of `num` equal ones.
fn choice(num: usize, x: f64) -> usize {
    ((x * num as f64) as usize).min(num.saturating_sub(1))
}

fn value_at(parameter: &Parameter, x: f64) -> Value {
    let within = |min: f64, max: f64| min + (max - min) * x;
    match parameter {
        Parameter::Const(value) => value.clone(),
        Parameter::Int(range) => {
            let num = range.max.abs_diff(range.min) as f64 + 1.0;
            let value = i128::from(range.min) + (x * num) as i128;
            Value::from(value.min(range.max.into()) as i64)
        }
        Parameter::Double(range) => json_number(within(range.min, range.max)),
        Parameter::Log(range) => json_number(range.base.powf(within(range.min, range.max))),
        Parameter::Categorical(values) => {
            values.get(choice(values.len(), x)).cloned().unwrap_or_default()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::json;
    use stoker_api::validate::SOBOL_DIMENSIONS_MAX;

    use super::*;
    use crate::search::rng::Random;

    fn point(index: u32, num_dimensions: usize) -> Vec<f64> {
        let unscrambled = |dimension| coordinate(&directions(dimension), index);
        (0..num_dimensions)
            .map(|dimension| f64::from(unscrambled(dimension)) / 2_f64.powi(32))
            .collect()
    }

    fn scrambled_points(num: u32, num_dimensions: usize, seed: u32) -> Vec<Vec<f64>> {
        let all: Vec<_> = (0..num_dimensions).map(directions).collect();
        let point = |index| {
            let dimensions = (0..).zip(&all);
            dimensions.map(|(i, of)| scrambled(coordinate(of, index), seed, i)).collect()
        };
        (0..num).map(point).collect()
    }

    /// First points of the authors' program, which visits them in the order of the Gray code.
    #[test]
    fn unscrambled_points_equal_those_of_joe_and_kuo() {
        let expected = [
            [0.0, 0.0, 0.0],
            [0.5, 0.5, 0.5],
            [0.75, 0.25, 0.25],
            [0.25, 0.75, 0.75],
            [0.375, 0.375, 0.625],
            [0.875, 0.875, 0.125],
            [0.625, 0.125, 0.875],
            [0.125, 0.625, 0.375],
            [0.1875, 0.3125, 0.9375],
            [0.6875, 0.8125, 0.4375],
        ];
        for (index, expected) in (0..).zip(expected) {
            assert_eq!(point(index ^ (index >> 1), 3), expected, "{index}");
        }
    }

    /// A polynomial of degree s over GF(2) is primitive if the powers of x have the period 2^s - 1.
    #[test]
    fn direction_numbers_belong_to_distinct_primitive_polynomials() {
        assert_eq!(JOE_KUO.len() + 1, SOBOL_DIMENSIONS_MAX);
        let mut seen = BTreeSet::new();
        for row in JOE_KUO {
            let degree = row.len() as u32 - 1;
            let polynomial = 1 << degree | row[0] << 1 | 1;
            assert!(seen.insert(polynomial), "{row:?}");
            let next = |x: &u32| {
                let x = x << 1;
                Some(if x >> degree == 1 { x ^ polynomial } else { x })
            };
            let powers = std::iter::successors(Some(1_u32), next).skip(1);
            let period = powers.take(1 << degree).position(|power| power == 1).map(|i| i + 1);
            assert_eq!(period, Some((1 << degree) - 1), "{row:?}");
            for (i, number) in (1..).zip(&row[1..]) {
                assert!(number % 2 == 1 && *number < 1 << i, "{row:?}");
            }
        }
    }

    #[test]
    fn blocks_of_powers_of_two_are_stratified() {
        let points = scrambled_points(256, SOBOL_DIMENSIONS_MAX, 7);
        for size in [1, 2, 4, 8, 16, 32, 64, 128, 256] {
            for block in points.chunks(size) {
                for dimension in 0..SOBOL_DIMENSIONS_MAX {
                    let interval = |point: &Vec<f64>| choice(size, point[dimension]);
                    let intervals: BTreeSet<_> = block.iter().map(interval).collect();
                    assert_eq!(intervals.len(), size, "dimension {dimension}");
                }
            }
        }
    }

    #[test]
    fn scrambling_depends_on_seed_and_dimension() {
        let of = |seed| scrambled_points(16, 2, seed);
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
        // Without scrambling, the first coordinate of all dimensions is 0.
        let firsts: BTreeSet<u64> =
            scrambled_points(1, 20, 3)[0].iter().map(|x| x.to_bits()).collect();
        assert_eq!(firsts.len(), 20);
        // Each coordinate is uniform over the seeds.
        let sum: f64 = (0..1000).map(|seed| scrambled_points(2, 1, seed)[1][0]).sum();
        assert!((sum / 1000.0 - 0.5).abs() < 0.03, "{sum}");
    }

    /// First outputs of SplitMix64 for the seeds 0 and 1234567.
    #[test]
    fn hash_is_the_generator_splitmix64() {
        const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
        assert_eq!(hash(0), 0xe220_a839_7b1d_cdaf);
        assert_eq!(hash(1_234_567), 6_457_827_717_110_365_317);
        assert_eq!(hash(STEP.wrapping_add(1_234_567)), 3_203_168_211_198_807_973);
    }

    /// With one shift of all points, the second bit would be flipped for both or for none.
    #[test]
    fn flips_of_a_bit_depend_on_the_bits_above() {
        let second_bit =
            |coordinate: u32, seed: u32| (scrambled(coordinate, seed, 0) * 4.0) as u32 % 2;
        let is_other = |seed: &u32| second_bit(0, *seed) != second_bit(1 << 31, *seed);
        let num_other = (0..1000).filter(is_other).count();
        assert!((400..600).contains(&num_other), "{num_other}");
    }

    /// L2 star discrepancy, by Warnock's formula.
    fn discrepancy(points: &[Vec<f64>]) -> f64 {
        let (num, size) = (points.len() as f64, points[0].len() as i32);
        let single: f64 = points
            .iter()
            .map(|point| point.iter().map(|x| (1.0 - x * x) / 2.0).product::<f64>())
            .sum();
        let pairs: f64 = points
            .iter()
            .flat_map(|one| points.iter().map(move |other| (one, other)))
            .map(|(one, other)| {
                one.iter().zip(other).map(|(x, y)| 1.0 - x.max(*y)).product::<f64>()
            })
            .sum();
        (3_f64.powi(-size) - 2.0 * single / num + pairs / (num * num)).sqrt()
    }

    #[test]
    fn discrepancy_is_below_that_of_random_points() {
        for (num, size, factor) in
            [(16, 2, 0.7), (64, 2, 0.4), (64, 5, 0.7), (256, 5, 0.5), (128, 10, 0.9)]
        {
            let mean = |of: &dyn Fn(u32) -> Vec<Vec<f64>>| {
                (0..8).map(|seed| discrepancy(&of(seed))).sum::<f64>() / 8.0
            };
            let sobol = mean(&|seed| scrambled_points(num, size, seed));
            let random = mean(&|seed| {
                let mut random = Random::new(seed);
                (0..num).map(|_| (0..size).map(|_| random.unit()).collect()).collect()
            });
            assert!(sobol < factor * random, "{num} points, {size} dimensions: {sobol} {random}");
        }
    }

    #[test]
    fn coordinates_are_fractions_of_the_range() {
        let check = |parameter: Value, values: &[(f64, f64)]| {
            let space = Space::parse(&json!({ "x": parameter })).unwrap();
            for (x, expected) in values {
                let value = value(&space, &mut std::iter::once(*x))["x"].as_f64().unwrap();
                assert!((value - expected).abs() < 1e-12, "{parameter} {x}: {value}");
            }
        };
        check(json!({ "double": { "min": -1, "max": 3 } }), &[(0.0, -1.0), (0.25, 0.0)]);
        check(json!({ "log": { "min": 1, "max": 3, "base": 10 } }), &[(0.0, 10.0), (0.5, 100.0)]);
        let thirds = [(0.0, 2.0), (0.33, 2.0), (0.34, 3.0), (0.66, 3.0), (0.67, 4.0), (0.99, 4.0)];
        check(json!({ "int": { "min": 2, "max": 4 } }), &thirds);
    }

    #[test]
    fn hyperparameters_stay_within_their_bounds() {
        let space = json!({
            "choice": { "categorical": ["a", "b", "c", "d"] },
            "number": { "int": { "min": i64::MIN, "max": i64::MAX } },
            "rate": { "log": { "min": -3, "max": 0 } },
            "net": { "oneOf": [
                { "width": { "int": { "min": 1, "max": 8 } } },
                { "kind": "none" },
            ] },
            "seven": 7,
        });
        let sobol = Sobol::new(Space::parse(&space).unwrap(), 1);
        let values: Vec<Value> = (0..32).map(|index| sobol.draw(index)).collect();
        let count =
            |matches: &dyn Fn(&Value) -> bool| values.iter().filter(|value| matches(value)).count();
        for choice in ["a", "b", "c", "d"] {
            assert_eq!(count(&|value| value["choice"] == choice), 8);
        }
        assert_eq!(count(&|value| value["net"]["kind"] == "none"), 16);
        assert_eq!(count(&|value| value["number"].as_i64().unwrap() < 0), 16);
        assert_eq!(count(&|value| (0.001..1.0).contains(&value["rate"].as_f64().unwrap())), 32);
        assert_eq!(count(&|value| value["seven"] == 7), 32);
        let width = |value: &Value| value["net"]["width"].as_i64();
        assert_eq!(count(&|value| width(value).is_some_and(|width| (1..=8).contains(&width))), 16);
    }
}
