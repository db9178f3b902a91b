//! Steps of optimizers over sums of gradients.

use burn::module::{Module, Param};
use burn::optim::SgdConfig;
use burn::optim::momentum::MomentumConfig;
use burn::tensor::{AllocationProperty, DType, Device, Tensor, TensorData};
use stoker_api::experiment::GradientCompression;

use super::state::OptimizersSnapshot;
use super::*;
use crate::collective::{Collective, SingleRank, ThreadRank};
use crate::step::StepOutput;

#[derive(Module, Debug)]
struct Two {
    used: Param<Tensor<1>>,
    unused: Param<Tensor<1>>,
}

fn model() -> Two {
    let device = Device::flex().autodiff();
    let param = || Param::from_tensor(Tensor::<1>::from_data([1.0, 1.0], &device));
    crate::record::initialize(Two { used: param(), unused: param() })
}

/// Returns a loss whose gradient of `used` is `[3, 4]` for each of `samples` samples.
fn output(model: &Two, samples: usize, is_mean: bool) -> Option<StepOutput> {
    let weights = Tensor::<1>::from_data([3.0, 4.0], &model.used.val().device());
    let loss = (model.used.val() * weights).sum();
    Some(match is_mean {
        true => StepOutput::mean(loss, samples),
        false => StepOutput::sum(loss * samples as f64, samples),
    })
}

fn values(param: &Param<Tensor<1>>) -> Vec<f32> {
    param.val().into_data().try_to_vec().unwrap()
}

fn sgd(rate: f64) -> Optimizers {
    Optimizers::one(SgdConfig::new().init(), rate)
}

/// Returns the model after a step with this sum.
fn stepped(optimizers: &mut Optimizers, model: Two, sum: GradientSum) -> Result<Two> {
    let gradients = optimizers.normalize(&model, sum, &SingleRank)?;
    optimizers.step(model, gradients)
}

#[test]
fn sums_and_means_give_the_mean_gradient() {
    for (first, second) in [(true, true), (false, false), (true, false)] {
        let (model, mut sum) = (model(), GradientSum::default());
        sum.add(&model, output(&model, 3, first), false);
        sum.add(&model, None, false);
        sum.add(&model, output(&model, 5, second), false);
        let model = stepped(&mut sgd(0.125), model, sum).unwrap();
        assert_eq!(values(&model.used), [0.625, 0.5]);
        assert_eq!(values(&model.unused), [1.0, 1.0]);
    }
}

#[test]
fn global_norm_is_clipped() {
    let check = |norm_max, expected: [f32; 2]| {
        let (model, mut sum) = (model(), GradientSum::default());
        sum.add(&model, output(&model, 4, false), false);
        let model = stepped(&mut sgd(0.25).clip_norm(norm_max), model, sum).unwrap();
        assert_eq!(values(&model.used), expected, "clipped to {norm_max}");
    };
    check(5.0, [0.25, 0.0]);
    check(2.5, [0.625, 0.5]);
}

#[test]
fn clipped_group_limits_its_gradients() {
    for (clipping, expected) in [
        (GradientClippingConfig::Value(3.5), [0.25, 0.125]),
        (GradientClippingConfig::Norm(2.5), [0.625, 0.5]),
        (GradientClippingConfig::Norm(6.0), [0.25, 0.0]),
    ] {
        let (model, mut sum) = (model(), GradientSum::default());
        sum.add(&model, output(&model, 4, false), false);
        let clipped = sgd(1.0).group_clipped("^used$", SgdConfig::new().build(), clipping, 0.25);
        let model = stepped(&mut clipped.unwrap(), model, sum).unwrap();
        assert_eq!(values(&model.used), expected);
    }
}

#[test]
fn step_without_samples_fails() {
    let error = stepped(&mut sgd(0.1), model(), GradientSum::default()).unwrap_err();
    assert!(error.to_string().starts_with("cannot step: the sample count is 0; "), "{error}");
}

/// A save writes a snapshot while training continues.
#[test]
fn snapshots_keep_the_state_of_their_step() {
    let momentum = SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
    let mut optimizers = Optimizers::one(momentum.init(), 0.5);
    let step = |optimizers: &mut Optimizers, model: Two| {
        let mut sum = GradientSum::default();
        sum.add(&model, output(&model, 4, true), false);
        stepped(optimizers, model, sum).unwrap()
    };
    let write = |(_, snapshot): (OptimizersState, OptimizersSnapshot)| {
        let mut contents = crate::checkpoint::NewContents::new();
        snapshot.write(&mut contents).unwrap();
        contents.remove("optimizers.bpk").unwrap().into_bytes()
    };
    let model = step(&mut optimizers, model());
    let expected = write(optimizers.snapshot(true));
    let snapshots = [true, false].map(|shares| optimizers.snapshot(shares));
    assert!(matches!(snapshots[0].1, OptimizersSnapshot::Shared(..)));
    assert!(matches!(snapshots[1].1, OptimizersSnapshot::Read(..)));
    step(&mut optimizers, model);
    assert!(snapshots.map(write).iter().all(|written| *written == expected));
    assert_ne!(write(optimizers.snapshot(true)), expected);
}

/// Two ranks with equal values.
#[derive(Debug)]
struct Twins {
    on_device: bool,
}

impl Collective for Twins {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        2
    }

    fn sum_f32(&self, values: &mut [f32]) -> Result<()> {
        values.iter_mut().for_each(|value| *value *= 2.0);
        Ok(())
    }

    fn sum_f64(&self, values: &mut [f64]) -> Result<()> {
        values.iter_mut().for_each(|value| *value *= 2.0);
        Ok(())
    }

    fn all_gather(&self, local: bytes::Bytes) -> Result<Vec<bytes::Bytes>> {
        Ok(vec![local.clone(), local])
    }

    fn sums_on_device(&self) -> bool {
        self.on_device
    }
}

#[test]
fn equal_ranks_step_like_one_rank() {
    let step = |ranks: &dyn Collective, compression| {
        let (model, mut sum) = (model(), GradientSum::default());
        sum.add(&model, output(&model, 4, true), false);
        let mut head = vec![1.5];
        let state = &mut AllReduceState::default();
        let sum = sum.all_reduce(&model, ranks, &mut head, compression, state).unwrap();
        assert_eq!(head, [1.5 * ranks.size() as f64]);
        let pending = sum.pending(&model).unwrap();
        assert_eq!(pending.gradients.len(), 1, "no gradient is not a gradient of zeros");
        let model = stepped(&mut sgd(0.25), model, sum).unwrap();
        (values(&model.used), values(&model.unused))
    };
    let alone = step(&SingleRank, GradientCompression::None);
    assert_eq!(alone, (vec![0.25, 0.0], vec![1.0, 1.0]));
    for on_device in [false, true] {
        let twins = Twins { on_device };
        for compression in
            [GradientCompression::None, GradientCompression::F16, GradientCompression::Bf16]
        {
            // These numbers are exact in half precision.
            assert_eq!(step(&twins, compression), alone, "{on_device} {compression:?}");
        }
    }
}

#[test]
fn compressed_gradients_are_rounded_to_their_bits() {
    let mean_of = |on_device, compression, gradient: f32| {
        let model = model();
        let loss = model.used.val().sum() * gradient;
        let mut sum = GradientSum::default();
        sum.add(&model, Some(StepOutput::sum(loss, 1)), false);
        let (ranks, state) = (Twins { on_device }, &mut AllReduceState::default());
        let sum = sum.all_reduce(&model, &ranks, &mut vec![], compression, state).unwrap();
        let data = sum.pending(&model).unwrap().gradients.swap_remove(0).1;
        data.try_to_vec::<f32>().unwrap()[0]
    };
    let fine = 1.0 + 1.0 / 512.0;
    for on_device in [false, true] {
        assert_eq!(mean_of(on_device, GradientCompression::None, fine), fine);
        assert_eq!(mean_of(on_device, GradientCompression::F16, fine), fine);
        assert_eq!(mean_of(on_device, GradientCompression::Bf16, fine), 1.0);
        // The mean fits, but the sum would not: 2 * 40,000 exceeds half precision.
        let large = mean_of(on_device, GradientCompression::F16, 40_000.0);
        assert_eq!(large, 40_000.0);
        let large = mean_of(on_device, GradientCompression::Bf16, 1e30);
        assert!((large / 1e30 - 1.0).abs() < 0.01, "{large}");
    }
}

#[test]
fn schedules_are_called_once_per_step() {
    let rate = |step: u64| [0.125, 0.25][step as usize];
    let mut optimizers = Optimizers::one(SgdConfig::new().init(), rate);
    let mut model = model();
    for expected in [[0.625, 0.5], [-0.125, -0.5]] {
        let mut sum = GradientSum::default();
        sum.add(&model, output(&model, 1, false), false);
        model = stepped(&mut optimizers, model, sum).unwrap();
        assert_eq!(values(&model.used), expected);
    }
}

#[test]
fn sum_of_means_moves_like_separate_batches() {
    let moved = |batches: u64| -> Vec<f32> {
        let (model, mut sum) = (model(), GradientSum::default());
        (0..2).for_each(|_| drop(sum.add(&model, output(&model, 4, true), false)));
        sum.mean_to_sum(batches);
        let before = values(&model.used);
        let after = values(&stepped(&mut sgd(0.25), model, sum).unwrap().used);
        before.iter().zip(after).map(|(before, after)| before - after).collect()
    };
    let (mean, both) = (moved(1), moved(2));
    assert!(mean.iter().any(|moved| *moved != 0.0));
    assert_eq!(both, mean.iter().map(|moved| 2.0 * moved).collect::<Vec<_>>());
}

#[derive(Module, Debug)]
struct Mixed {
    single: Param<Tensor<1>>,
    double: Param<Tensor<1>>,
    last: Param<Tensor<1>>,
}

fn mixed() -> Mixed {
    let device = Device::flex().autodiff();
    let param = |dtype| Param::from_tensor(Tensor::<1>::ones([2], (&device, dtype)));
    let model =
        Mixed { single: param(DType::F32), double: param(DType::F64), last: param(DType::F32) };
    crate::record::initialize(model)
}

/// The gradients are [2, 2], [2, 2] and [0, 0], so their norm is 4.
#[test]
fn norm_covers_all_element_types() {
    let model = mixed();
    let loss = (model.single.val() * 2.0).sum().cast(DType::F64)
        + (model.double.val() * 2.0).sum()
        + (model.last.val() * 0.0).sum().cast(DType::F64);
    let mut sum = GradientSum::default();
    sum.add(&model, Some(StepOutput::mean(loss, 1)), false);
    let mut optimizers = sgd(0.5).clip_norm(2.0);
    let gradients = optimizers.normalize(&model, sum, &SingleRank).unwrap();
    let model = optimizers.step(model, gradients).unwrap();
    let of = |param: &Param<Tensor<1>>| param.val().into_data().try_to_vec_as::<f64>().unwrap();
    assert_eq!(
        [of(&model.single), of(&model.double), of(&model.last)],
        [[0.5; 2], [0.5; 2], [1.0; 2]]
    );
}

/// On a processor with other instructions, the norm could be rounded otherwise.
#[test]
fn all_ranks_clip_by_the_norm_of_the_first() {
    std::thread::scope(|scope| {
        let step = |ranks: ThreadRank| {
            let weights = Tensor::<1>::from_data([3.0, 4.0], &Device::flex().autodiff());
            let (model, mut sum) = (model(), GradientSum::default());
            // The norm is 5 on rank 0 and 10 on rank 1.
            let loss = (model.used.val() * weights * (1 + ranks.rank()) as f64).sum();
            sum.add(&model, Some(StepOutput::sum(loss, 1)), false);
            let mut optimizers = sgd(0.25).clip_norm(2.5);
            let gradients = optimizers.normalize(&model, sum, &ranks).unwrap();
            values(&optimizers.step(model, gradients).unwrap().used)
        };
        let ranks = ThreadRank::group(2).into_iter();
        let ranks: Vec<_> = ranks.map(|ranks| scope.spawn(move || step(ranks))).collect();
        let stepped: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        assert_eq!(stepped, [[0.625, 0.5], [0.25, 0.0]]);
    });
}

/// The square of a value in half precision may be infinite.
#[test]
fn norm_of_half_precision_is_finite() {
    let device = Device::flex().autodiff();
    let ones = || Tensor::<1>::ones([2], (&device, DType::F16));
    let param = || Param::from_tensor(ones());
    let model = crate::record::initialize(Two { used: param(), unused: param() });
    let mut sum = GradientSum::default();
    let loss = (model.used.val() * 300.0).sum() + (model.unused.val() * 400.0).sum();
    sum.add(&model, Some(StepOutput::sum(loss, 1)), false);
    // The norm is 500 times the root of 2, so the gradients are divided by 256.
    let mut optimizers = sgd(0.5).clip_norm(2.0_f64.sqrt() * 500.0 / 256.0);
    let gradients = optimizers.normalize(&model, sum, &SingleRank).unwrap();
    let model = optimizers.step(model, gradients).unwrap();
    let of = |param: &Param<Tensor<1>>| param.val().into_data().try_to_vec_as::<f32>().unwrap();
    assert_eq!((of(&model.used), of(&model.unused)), (vec![0.414_062_5; 2], vec![0.218_75; 2]));
}

#[test]
fn ranks_with_other_parameters_are_rejected() {
    let errors: Vec<String> = std::thread::scope(|scope| {
        let reduce = |ranks: ThreadRank| {
            let mut model = model();
            if ranks.rank() == 1 {
                model.unused = model.unused.set_require_grad(false);
            }
            let sum = GradientSum::default();
            let (none, state) = (GradientCompression::None, &mut AllReduceState::default());
            let reduced = sum.all_reduce(&model, &ranks, &mut vec![], none, state);
            reduced.map(drop).unwrap_err().to_string()
        };
        let ranks = ThreadRank::group(3).into_iter();
        let ranks: Vec<_> = ranks.map(|ranks| scope.spawn(move || reduce(ranks))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let expected = "rank 1 has gradients of 2 values in single and 0 in double precision, but \
                    rank 0 of 4 and 0; train the same parameters";
    assert!(errors.iter().all(|error| error.starts_with(expected)), "{errors:?}");
}

#[test]
fn double_gradients_are_summed_in_double() {
    let model = mixed();
    // Single precision rounds this value to 1.
    let fine = 1.0 + 2.0_f64.powi(-40);
    let output = || {
        let loss = (model.single.val() * 3.0).sum().cast(DType::F64)
            + (model.double.val() * fine).sum()
            + (model.last.val() * 5.0).sum().cast(DType::F64);
        StepOutput::mean(loss, 2)
    };
    for on_device in [false, true] {
        let mut sum = GradientSum::default();
        sum.add(&model, Some(output()), false);
        let (ranks, mut state) = (Twins { on_device }, AllReduceState::default());
        let none = GradientCompression::None;
        let sum = sum.all_reduce(&model, &ranks, &mut vec![], none, &mut state).unwrap();
        let pending = sum.pending(&model).unwrap().gradients;
        let means: Vec<Vec<f64>> =
            pending.iter().map(|(_, data)| data.try_to_vec_as::<f64>().unwrap()).collect();
        assert_eq!(means, [[3.0, 3.0], [fine, fine], [5.0, 5.0]], "{on_device}");
        assert_eq!(pending[1].1.dtype(), DType::F64, "{on_device}");
    }
}

#[test]
fn shared_parameter_counts_once_in_the_norm() {
    let Two { used, .. } = model();
    let model = Two { unused: used.clone(), used };
    let mut sum = GradientSum::default();
    sum.add(&model, output(&model, 4, false), false);
    // The gradient is [3, 4], so its norm is 5.
    let model = stepped(&mut sgd(0.25).clip_norm(2.5), model, sum).unwrap();
    assert_eq!(values(&model.used), [0.625, 0.5]);
}

/// A checkpoint's bytes are shared, and their address may be misaligned.
#[test]
fn misaligned_gradients_are_all_reduced() {
    let values = [3.0_f32, 4.0].map(f32::to_ne_bytes).concat();
    // Of two adjacent addresses, one is misaligned.
    let both =
        [[&[0][..], &values].concat(), [&[0, 0][..], &values].concat()].map(bytes::Bytes::from);
    let mut both = both.into_iter().zip(1..).map(|(bytes, padding)| bytes.slice(padding..));
    let bytes = both.find(|bytes| bytes.as_ptr().addr() % 4 != 0).unwrap();
    let bytes = burn::tensor::Bytes::from_shared(bytes, AllocationProperty::Native);
    let data = TensorData::from_bytes(bytes, [2], DType::F32);
    let model = model();
    let pending =
        PendingGradients { gradients: vec![(0, data)], num_gradients: vec![1, 0], count: 2.0 };
    let sum = GradientSum::restore(&model, pending);
    let (ranks, mut state) = (Twins { on_device: false }, AllReduceState::default());
    let none = GradientCompression::None;
    let sum = sum.all_reduce(&model, &ranks, &mut vec![], none, &mut state).unwrap();
    let mean = sum.pending(&model).unwrap().gradients.swap_remove(0).1;
    assert_eq!(mean.try_to_vec::<f32>().unwrap(), [1.5, 2.0]);
}
