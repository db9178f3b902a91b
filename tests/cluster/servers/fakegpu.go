package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const (
	resource = "nvidia.com/gpu"
	endpoint = "stoker-gpu.sock"
	// How often the files that say what is offered, and the kubelet's socket, are looked at.
	period = 100 * time.Millisecond
)

// gpus offers devices that do not exist to the kubelet, by the real device plugin API.
//
// The file `devices` names them, and says after a name that it is sick:
//
//	gpu-0
//	gpu-1 sick
type gpus struct {
	api.UnimplementedDevicePluginServer
	devices string
}

func (g *gpus) list() []*api.Device {
	text, err := os.ReadFile(g.devices)
	if err != nil {
		return nil
	}
	var list []*api.Device
	for line := range strings.Lines(string(text)) {
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		device := &api.Device{ID: words[0], Health: api.Healthy}
		if slices.Contains(words[1:], "sick") {
			device.Health = api.Unhealthy
		}
		list = append(list, device)
	}
	return list
}

func (g *gpus) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return &api.DevicePluginOptions{}, nil
}

func (g *gpus) ListAndWatch(_ *api.Empty, stream grpc.ServerStreamingServer[api.ListAndWatchResponse]) error {
	sent := "nothing yet"
	for {
		list := g.list()
		if now := fmt.Sprint(list); now != sent {
			if err := stream.Send(&api.ListAndWatchResponse{Devices: list}); err != nil {
				return err
			}
			sent = now
		}
		select {
		case <-stream.Context().Done():
			return nil
		case <-time.After(period):
		}
	}
}

func (g *gpus) Allocate(_ context.Context, request *api.AllocateRequest) (*api.AllocateResponse, error) {
	response := &api.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		ids := slices.Sorted(slices.Values(container.DevicesIds))
		response.ContainerResponses = append(response.ContainerResponses, &api.ContainerAllocateResponse{
			Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": strings.Join(ids, ",")},
		})
	}
	return response, nil
}

// fakeGPU serves until it is killed: fake-gpu PLUGIN_FOLDER DEVICES_FILE. A kubelet that starts
// empties the folder, so a plugin whose socket is gone makes a new one and registers again.
func fakeGPU(args []string) error {
	if len(args) != 2 {
		return errors.New("usage: fake-gpu PLUGIN_FOLDER DEVICES_FILE")
	}
	socket := filepath.Join(args[0], endpoint)
	for {
		if err := serveOnce(args[0], socket, &gpus{devices: args[1]}); err != nil {
			fmt.Fprintln(os.Stderr, "fake-gpu: trying again:", err)
		}
		time.Sleep(period)
	}
}

// serveOnce registers with the kubelet and serves until the socket is removed.
func serveOnce(folder, socket string, plugin *gpus) error {
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	api.RegisterDevicePluginServer(server, plugin)
	go func() { _ = server.Serve(listener) }()
	defer server.Stop()

	if err := register(filepath.Join(folder, "kubelet.sock")); err != nil {
		return err
	}
	for {
		if _, err := os.Stat(socket); err != nil {
			return nil
		}
		time.Sleep(period)
	}
}

func register(kubelet string) error {
	connection, err := grpc.NewClient("unix:"+kubelet, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_, err = api.NewRegistrationClient(connection).Register(ctx, &api.RegisterRequest{
		Version: api.Version, Endpoint: endpoint, ResourceName: resource,
	})
	return err
}
