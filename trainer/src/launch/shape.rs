//! Which ranks a pod has, and what each is told of the gang.

use stoker_api::contract::Gang;

use crate::Result;
use crate::error::Infrastructure;

/// A gang's ranks over its pods, seen from one of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    /// Ranks in all.
    pub(super) world_size: u32,
    ranks_per_pod: u32,
    /// This pod.
    pub(super) pod_index: u32,
}

/// What one rank is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RankNumbers {
    pub(super) rank: u32,
    world_size: u32,
    local_rank: u32,
    pub(super) local_world_size: u32,
    cross_rank: u32,
    cross_size: u32,
}

impl Shape {
    /// Without a gang there is one rank.
    ///
    /// # Errors
    ///
    /// The gang has no such pod.
    pub(super) fn new(gang: Option<&Gang>, pod_index: u32) -> Result<Self> {
        let (world_size, ranks_per_pod) =
            gang.map_or((1, 1), |it| (it.world_size, it.ranks_per_pod));
        let shape = Self { world_size, ranks_per_pod, pod_index };
        if world_size == 0 || ranks_per_pod == 0 || pod_index >= shape.num_pods() {
            return Err(Infrastructure(format!(
                "a gang of {world_size} ranks with {ranks_per_pod} in each pod has no pod \
                 {pod_index}"
            ))
            .into());
        }
        Ok(shape)
    }

    fn num_pods(&self) -> u32 {
        self.world_size.div_ceil(self.ranks_per_pod)
    }

    /// The ranks of this pod.
    pub(super) fn ranks(&self) -> impl Iterator<Item = RankNumbers> {
        let first = self.pod_index * self.ranks_per_pod;
        let end = self.world_size.min(first + self.ranks_per_pod);
        let (world_size, cross_rank, cross_size) =
            (self.world_size, self.pod_index, self.num_pods());
        (first..end).map(move |rank| RankNumbers {
            rank,
            world_size,
            local_rank: rank - first,
            local_world_size: end - first,
            cross_rank,
            cross_size,
        })
    }
}

impl RankNumbers {
    /// The variables that say so.
    pub(super) fn environment(&self) -> Vec<(&'static str, String)> {
        let numbers = [
            ("RANK", self.rank),
            ("WORLD_SIZE", self.world_size),
            ("LOCAL_RANK", self.local_rank),
            ("LOCAL_WORLD_SIZE", self.local_world_size),
            ("CROSS_RANK", self.cross_rank),
            ("CROSS_SIZE", self.cross_size),
        ];
        numbers.map(|(name, number)| (name, number.to_string())).to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(world_size: u32, ranks_per_pod: u32, pod_index: u32) -> Result<Shape> {
        let (rendezvous, secret) = ("t-0:29400".into(), "00".into());
        let gang = Gang { world_size, ranks_per_pod, rendezvous, secret };
        Shape::new(Some(&gang), pod_index)
    }

    /// Rank, world, local rank, local world, cross rank, cross size of each.
    fn check(shape: Result<Shape>, expected: &[[u32; 6]]) {
        let ranks: Vec<_> = shape.unwrap().ranks().collect();
        let of = |it: RankNumbers| {
            [
                it.rank,
                it.world_size,
                it.local_rank,
                it.local_world_size,
                it.cross_rank,
                it.cross_size,
            ]
        };
        assert_eq!(ranks.into_iter().map(of).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn ranks_are_counted_over_pods() {
        check(Shape::new(None, 0), &[[0, 1, 0, 1, 0, 1]]);
        check(shape(4, 1, 2), &[[2, 4, 0, 1, 2, 4]]);
        check(shape(4, 2, 1), &[[2, 4, 0, 2, 1, 2], [3, 4, 1, 2, 1, 2]]);
        check(shape(3, 2, 1), &[[2, 3, 0, 1, 1, 2]]);
    }

    #[test]
    fn a_pod_that_the_gang_has_not_is_refused() {
        let check = |shape: Result<Shape>, expected: &str| {
            assert_eq!(shape.unwrap_err().to_string(), expected);
        };
        check(shape(4, 2, 2), "a gang of 4 ranks with 2 in each pod has no pod 2");
        check(shape(4, 0, 0), "a gang of 4 ranks with 0 in each pod has no pod 0");
    }

    #[test]
    fn the_variables_have_the_names_that_programs_know() {
        let ranks: Vec<_> = shape(4, 2, 1).unwrap().ranks().collect();
        let text: Vec<_> =
            ranks[1].environment().iter().map(|it| format!("{}={}", it.0, it.1)).collect();
        assert_eq!(
            text.join(" "),
            "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 CROSS_RANK=1 CROSS_SIZE=2"
        );
    }
}
