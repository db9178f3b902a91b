//! Population based training.

use serde::{Deserialize, Serialize};

use super::length::{Length, Unit};
#[cfg(feature = "crd")]
use super::schema::{PBT, fixed};

/// Population based training: all trials of a population train in rounds. After each round, copies
/// of the best trials replace the worst. A copy continues from the checkpoint of its source, with
/// changed hyperparameters.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "crd", schemars(extend("x-kubernetes-validations" = fixed(&PBT))))]
#[serde(rename_all = "camelCase")]
pub struct PbtSearch {
    /// Number of trials that train in each round, from 2 to 1,000. `populationSize` times
    /// `numRounds` is at most 2,048.
    #[cfg_attr(feature = "crd", schemars(range(min = 2, max = 1000)))]
    pub population_size: u32,
    /// Training length of a round.
    pub length_per_round: Length,
    /// Number of rounds, from 1 to 128. The full length of a trial is `lengthPerRound` times
    /// `numRounds`.
    #[cfg_attr(feature = "crd", schemars(range(min = 1, max = 128)))]
    pub num_rounds: u32,
    /// Fraction of the population that copies replace after each round, from 0 to 0.5. The number
    /// of copies is rounded down. Default: 0.2.
    #[serde(default = "default_fraction")]
    #[cfg_attr(feature = "crd", schemars(range(min = 0.0, max = 0.5)))]
    pub truncate_fraction: f64,
    /// Probability that a copy samples a hyperparameter again instead of changing that of its
    /// source, from 0 to 1. Default: 0.2.
    #[serde(default = "default_fraction")]
    #[cfg_attr(feature = "crd", schemars(range(min = 0.0, max = 1.0)))]
    pub resample_probability: f64,
    /// Relative change of a number, up or down with equal probability, from 0 to 1. With 0.2, a
    /// copy multiplies the number of its source by 0.8 or 1.2. Choices and constants stay. Default:
    /// 0.2.
    #[serde(default = "default_fraction")]
    #[cfg_attr(feature = "crd", schemars(range(min = 0.0, max = 1.0)))]
    pub perturb_factor: f64,
}

impl PbtSearch {
    /// Returns the full length of a trial; `None` if `lengthPerRound` is invalid or the length too
    /// large.
    pub fn length(&self) -> Option<(Unit, u64)> {
        let (unit, units) = self.length_per_round.get()?;
        Some((unit, units.checked_mul(self.num_rounds.into())?))
    }

    /// Returns the number of trials that copies replace after each round.
    pub fn num_truncated(&self) -> u32 {
        // A product such as 0.29 * 100 may be less than the integer that it stands for.
        (self.truncate_fraction * f64::from(self.population_size) + 1e-9).floor() as u32
    }
}

fn default_fraction() -> f64 {
    0.2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hundredths_of_a_population_are_exact() {
        for population_size in 2..=1000 {
            for hundredths in 0..=50 {
                let search = PbtSearch {
                    population_size,
                    length_per_round: Length::new(Unit::Epochs, 1),
                    num_rounds: 2,
                    truncate_fraction: f64::from(hundredths) / 100.0,
                    resample_probability: 0.2,
                    perturb_factor: 0.2,
                };
                let expected = hundredths * population_size / 100;
                assert_eq!(search.num_truncated(), expected, "{hundredths} % of {population_size}");
            }
        }
    }
}
