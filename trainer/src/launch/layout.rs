//! Ranks of a pod, and their environment variables.

use stoker_api::contract::Gang;

use crate::Result;
use crate::error::Infrastructure;

/// Distribution of a gang's ranks over pods, as seen from one pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GangLayout {
    /// Total number of ranks.
    pub(super) world_size: u32,
    ranks_per_pod: u32,
    /// Index of this pod.
    pub(super) pod_index: u32,
}

/// Numbers that one rank receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RankTopology {
    pub(super) rank: u32,
    pub(super) world_size: u32,
    local_rank: u32,
    pub(super) local_world_size: u32,
    cross_rank: u32,
    cross_size: u32,
}

impl GangLayout {
    /// Creates the shape; without a gang there is one rank.
    ///
    /// # Errors
    ///
    /// Fails if the pod index is outside the gang.
    pub(super) fn new(gang: Option<&Gang>, pod_index: u32) -> Result<Self> {
        let (world_size, ranks_per_pod) =
            gang.map_or((1, 1), |gang| (gang.world_size, gang.ranks_per_pod));
        let layout = Self { world_size, ranks_per_pod, pod_index };
        if world_size == 0 || ranks_per_pod == 0 || pod_index >= layout.num_pods() {
            return Err(Infrastructure(format!(
                "pod index {pod_index} is out of range for a gang of {world_size} ranks with \
                 {ranks_per_pod} in each pod"
            ))
            .into());
        }
        Ok(layout)
    }

    fn num_pods(&self) -> u32 {
        self.world_size.div_ceil(self.ranks_per_pod)
    }

    /// Returns the ranks of this pod.
    pub(super) fn ranks(&self) -> impl Iterator<Item = RankTopology> {
        let first = self.pod_index * self.ranks_per_pod;
        let end = self.world_size.min(first + self.ranks_per_pod);
        let (world_size, cross_rank, cross_size) =
            (self.world_size, self.pod_index, self.num_pods());
        (first..end).map(move |rank| RankTopology {
            rank,
            world_size,
            local_rank: rank - first,
            local_world_size: end - first,
            cross_rank,
            cross_size,
        })
    }
}

impl RankTopology {
    /// Returns the environment variables with the numbers.
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

    fn layout(world_size: u32, ranks_per_pod: u32, pod_index: u32) -> Result<GangLayout> {
        let (rendezvous, secret) = ("t-0:29400".into(), "00".into());
        let gang = Gang { world_size, ranks_per_pod, rendezvous, secret };
        GangLayout::new(Some(&gang), pod_index)
    }

    /// Checks rank, world size, local rank, local size, cross rank and cross size of each rank.
    fn check(layout: Result<GangLayout>, expected: &[[u32; 6]]) {
        let ranks: Vec<_> = layout.unwrap().ranks().collect();
        let of = |rank: RankTopology| {
            [
                rank.rank,
                rank.world_size,
                rank.local_rank,
                rank.local_world_size,
                rank.cross_rank,
                rank.cross_size,
            ]
        };
        assert_eq!(ranks.into_iter().map(of).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn ranks_are_numbered_across_pods() {
        check(GangLayout::new(None, 0), &[[0, 1, 0, 1, 0, 1]]);
        check(layout(4, 1, 2), &[[2, 4, 0, 1, 2, 4]]);
        check(layout(4, 2, 1), &[[2, 4, 0, 2, 1, 2], [3, 4, 1, 2, 1, 2]]);
        check(layout(3, 2, 1), &[[2, 3, 0, 1, 1, 2]]);
    }

    #[test]
    fn pod_index_out_of_range_is_refused() {
        let check = |layout: Result<GangLayout>, expected: &str| {
            assert_eq!(layout.unwrap_err().to_string(), expected);
        };
        let expected = "pod index 2 is out of range for a gang of 4 ranks with 2 in each pod";
        check(layout(4, 2, 2), expected);
        let expected = "pod index 0 is out of range for a gang of 4 ranks with 0 in each pod";
        check(layout(4, 0, 0), expected);
    }

    #[test]
    fn environment_has_the_standard_names() {
        let ranks: Vec<_> = layout(4, 2, 1).unwrap().ranks().collect();
        let environment = ranks[1].environment();
        let text: Vec<_> =
            environment.iter().map(|(name, value)| format!("{name}={value}")).collect();
        assert_eq!(
            text.join(" "),
            "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 CROSS_RANK=1 CROSS_SIZE=2"
        );
    }
}
